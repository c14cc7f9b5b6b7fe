import json
import sys

import numpy as np
import pytest
from PIL import Image

from elude_steer.errors import StorageError
from elude_steer.toyland import PLACES, draw_scene, parse, scenes
from elude_steer.toyland.scenes import CLUTTER, PATCH, SIDE, write_scenes
from elude_steer.toyland.world import JUMPERS, ROOFS


@pytest.fixture(scope="module")
def series():
    return list(scenes(seed=5, n=300))


def test_a_seed_determines_every_scene_of_its_series(series):
    again = list(scenes(seed=5, n=3, start=100))
    for one, other in zip(again, series[100:103], strict=True):
        assert one.caption == other.caption
        assert one.image.tobytes() == other.image.tobytes()
        assert np.array_equal(one.truth, other.truth)
    assert [s.caption for s in scenes(seed=6, n=10)] != [s.caption for s in series[:10]]


def test_scenes_vary(series):
    assert {len(scene.things) for scene in series} == {0, 1, 2, 3}
    assert {scene.relation for scene in series} == {None, "on", "above", "under", "next to"}
    assert {scene.image.size for scene in series} == {(SIDE, SIDE), (2 * SIDE, SIDE), (SIDE, 2 * SIDE)}
    assert {scene.background for scene in series} == set(PLACES)
    assert any(thing.jumping for scene in series for thing in scene.things)
    assert 0.2 < np.mean([scene.clutter > 0 for scene in series]) < 0.6
    assert np.mean([thing.visible >= 0.6 for scene in series for thing in scene.things]) > 0.97


def test_positions_agree_with_the_caption(series):
    for scene in series:
        boxes = [thing.box for thing in scene.things]
        if scene.relation == "next to":
            assert boxes[0][0] < boxes[1][0], "the left object comes first"
        elif scene.relation in ("on", "above"):
            assert boxes[0][3] < boxes[1][3]
            gap = boxes[1][1] - boxes[0][3]
            assert gap < 0 if scene.relation == "on" else gap > 0
        elif scene.relation == "under":
            assert boxes[1][3] < boxes[0][1]
            assert scene.objects[1] in ROOFS
        for thing in scene.things:
            assert thing.box[0] >= 0
            assert thing.box[2] <= scene.image.width
            assert not thing.jumping or thing.name in JUMPERS


def test_patches_name_what_they_show(series):
    for scene in series[:100]:
        shown = {name for row in scene.patches for name in row}
        assert shown <= {*scene.objects, scene.background, CLUTTER}
        assert len(scene.patches) == scene.image.height // PATCH
        assert len(scene.patches[0]) == scene.image.width // PATCH
        big = [t for t in scene.things if t.box[2] - t.box[0] > 24 and t.box[3] - t.box[1] > 24 and t.visible > 0.8]
        assert {thing.name for thing in big} <= shown
    scene = draw_scene(np.random.default_rng(1), wide=0, clutter=0, things=["apple"], place="snow")
    left, top, right, bottom = (edge / SIDE for edge in scene.things[0].box)
    assert scene.names_at(np.array([[left, top, right, bottom], [0, 0, 0.05, 0.05]])) == ["apple", "snow"]


def test_chosen_objects_places_and_relations_are_drawn():
    rng = np.random.default_rng(3)
    scene = draw_scene(rng, things=["dog", "motorcycle", "ball"], place="beach", relation="on")
    assert scene.caption == "a dog on a motorcycle with a ball at the beach"
    scene = draw_scene(rng, things=["cat"], place="room", jumping=True)
    assert scene.caption == "a jumping cat in a room"
    assert draw_scene(rng, things=[], place="graffiti").caption == "nothing by a graffiti wall"


def test_scenes_are_written_with_their_captions(tmp_path):
    folder = write_scenes(tmp_path / "out", 4, 3)
    lines = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    assert [line["caption"] for line in lines] == [scene.caption for scene in scenes(3, 4)]
    with Image.open(folder / lines[0]["file"]) as image:
        assert image.size in {(96, 96), (192, 96), (96, 192)}
    with pytest.raises(StorageError, match="is not an empty folder; give a new one"):
        write_scenes(folder, 4, 3)


def test_the_command_line_draws_and_captions(tmp_path, monkeypatch, capsys):
    from elude_steer.cli.entry_point import main

    monkeypatch.setattr(
        sys, "argv", ["elude-steer", "toyland", "draw", str(tmp_path / "s"), "--count", "2", "--seed", "3"]
    )
    main()
    assert capsys.readouterr().out.strip() == str(tmp_path / "s")
    monkeypatch.setattr(sys, "argv", ["elude-steer", "caption", str(tmp_path / "s" / "scene-0000.png")])
    main()
    assert parse(capsys.readouterr().out.strip()).well_formed
    monkeypatch.setattr(sys, "argv", ["elude-steer", "caption", str(tmp_path / "nothing.png"), "--model", "x"])
    with pytest.raises(SystemExit):
        main()
    assert "nothing.png' cannot be read: No such file or directory; check the path." in capsys.readouterr().err


def test_a_scene_without_one_of_its_objects_names_what_is_left():
    def draw(things, relation, *hidden):
        rng = np.random.default_rng(8)
        return draw_scene(rng, wide=0, things=things, place="beach", relation=relation, jumping=False, hidden=hidden)

    whole = draw(["dog", "car", "hat"], "on")
    assert whole.caption == "a dog on a car with a hat at the beach"
    captions = {name: draw(["dog", "car", "hat"], "on", name).caption for name in whole.objects}
    assert captions == {
        "dog": "a car next to a hat at the beach",
        "car": "a dog next to a hat at the beach",
        "hat": "a dog on a car at the beach",
    }
    alone = draw(["dog", "car"], "on", "car")
    assert (alone.caption, alone.relation, alone.objects) == ("a dog at the beach", None, ("dog",))
    left = draw(["dog", "car", "hat"], "on", "hat")
    assert left.things == whole.things[:2]
    assert np.array_equal(left.truth, np.where(whole.truth == 3, 0, whole.truth))


def test_one_of_several_objects_can_be_left_out_by_chance():
    kept = [draw_scene(np.random.default_rng(i), hide=0.0) for i in range(40)]
    left = [draw_scene(np.random.default_rng(i), hide=1.0) for i in range(40)]
    for whole, less in zip(kept, left, strict=True):
        several = len(whole.things) > 1
        assert len(less.things) == len(whole.things) - several
        assert set(less.objects) <= set(whole.objects)
        assert parse(less.caption).objects == less.objects
