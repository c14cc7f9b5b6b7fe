"""Calls the page as programs do: `python -m tests.helpers.programs mcp ADDRESS < calls.json` prints answers as JSON.

In a process of its own, because the clients' sockets stay open. `calls.json` is a list of `[function, arguments]`.
"""

import asyncio
import json
import subprocess
import sys


async def call_tools(address, calls):
    """The tools of the MCP server, and for each call whether it failed and the texts of its answer."""
    from mcp import ClientSession
    from mcp.client.streamable_http import streamablehttp_client

    async with (
        streamablehttp_client(f"{address}gradio_api/mcp/") as (read, write, _),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        tools = {tool.name: tool.model_dump() for tool in (await session.list_tools()).tools}
        answers = [await session.call_tool(name, arguments) for name, arguments in calls]
    return [tools, *([one.isError, [part.text for part in one.content]] for one in answers)]


def call_functions(address, calls):
    """The functions in the page's description, and for each call whether it failed and its answer.

    `{"file": PATH}` as an image is uploaded first.
    """
    from gradio_client import Client, handle_file

    client, answers = Client(address, verbose=False), []
    for name, arguments in calls:
        image = arguments.get("image")
        given = {**arguments, "image": handle_file(image["file"])} if isinstance(image, dict) else arguments
        try:
            answers.append([False, client.predict(**given, api_name=f"/{name}")])
        except Exception as error:  # noqa: BLE001
            answers.append([True, str(error)])
    functions = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    return [functions, *answers]


def call(kind, address, *calls):
    """Run this module on some calls, and return what it prints."""
    command = [sys.executable, "-m", "tests.helpers.programs", kind, address]
    done = subprocess.run(command, input=json.dumps(calls), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    _, kind, address = sys.argv
    calls = json.load(sys.stdin)
    print(json.dumps(asyncio.run(call_tools(address, calls)) if kind == "mcp" else call_functions(address, calls)))
