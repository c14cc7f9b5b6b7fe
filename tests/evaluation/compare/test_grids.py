"""The grids that all methods share."""

from elude_steer.evaluation.compare.grids import GRIDS, find_border, take_values
from elude_steer.evaluation.edits.sweep import grid_points
from elude_steer.recipe_files import load_spec


def test_every_setting_that_varies_has_values_inside():
    for (mode, _), grid in GRIDS.items():
        points = grid_points(grid)
        assert {point["mode"] for point in points} == {mode}
        assert all(len(values) == 1 or len(values) >= 3 for values in grid.values())
        assert any(not find_border(grid, point) for point in points)
        assert len(grid_points(take_values(grid, 1))) == 1
        assert take_values(grid, None) == grid


def test_the_settings_of_the_atlas_lie_inside_the_grid_of_place():
    steering, grid = load_spec("toyland").steering, GRIDS["place", "remove"]
    settings = {name: getattr(steering, name) for name in grid}
    assert all(settings[name] in values for name, values in grid.items())
    assert find_border(grid, settings) == []


def test_a_border_is_the_first_or_last_of_several_values():
    grid = {"mode": ("place",), "strength": (0.5, 1, 2), "fit": (0.1, 0.3)}
    assert find_border(grid, {"mode": "place", "strength": 1, "fit": 0.3}) == ["fit"]
    assert find_border(grid, {"mode": "place", "strength": 2, "fit": 0.1}) == ["strength", "fit"]
