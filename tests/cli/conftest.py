import pytest


@pytest.fixture(autouse=True)
def separate_home(tmp_path, monkeypatch):
    """Keep atlases and work of these tests apart from the user's."""
    monkeypatch.setenv("ELUDE_STEER_HOME", str(tmp_path / "home"))


@pytest.fixture
def spec_file(tiny_llava, tmp_path):
    """A build spec of the tiny model."""
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"name: tiny\nmodel:\n  id: {tiny_llava}\n  layer: layers.1.mlp.fc2\n"
        "tokens:\n  per_image: 8\nclusters:\n  top_k: 200\n  min_cluster_size: 6\n"
    )
    return path
