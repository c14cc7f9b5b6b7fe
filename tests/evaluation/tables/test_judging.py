"""Judges and dictionaries: pairs of every two methods, pooled over the draws of tokens."""

import pytest

from elude_steer.errors import SpecError
from elude_steer.evaluation.measures.llm_judges import Judge
from elude_steer.evaluation.tables.judging import draw_method_pairs, judge_methods
from elude_steer.evaluation.tables.setup import TINY, TableSetup
from elude_steer.specs import AtlasSpec, ClustersSpec, ModelSpec, TokensSpec
from tests.helpers.judge_server import Server, answer

pytest.importorskip("openai", reason="the judge needs openai: pip install 'elude-steer[judge]'")
NAMES = ["raw units", "random split", "topk SAE"]


def test_methods_are_judged_over_all_draws_of_tokens(tmp_path):
    spec = AtlasSpec(
        "toyland",
        ModelSpec("toyland/captioner", "layers.5.mlp.fc2"),
        tokens=TokensSpec(per_image=8),
        clusters=ClustersSpec(top_k=40, min_cluster_size=5, units=4),
    )
    setup = TableSetup(spec, "toyland:5", "toyland:6", tmp_path, TINY, limit=16, held_out_limit=12, threads=1)
    pairs = draw_method_pairs(setup, NAMES, count=1)
    assert len(pairs) == 3 * len(TINY.seeds)  # three pairs of methods, one pair of latents, two draws
    assert {pair.about.split(",")[0] for pair in pairs} == {"seed 42", "seed 123"}
    questions = []
    with Server(lambda _model, first, second, _count: answer("A" if first < second else "B")) as server:
        judges = [Judge(name, server.url) for name in ("one", "two")]
        ranking = judge_methods(setup, judges, NAMES, count=1, confirm=questions.append)
        again = judge_methods(setup, judges, NAMES, count=1, confirm=questions.append)
    assert again == ranking and questions[1] == 0 and 0 < questions[0] <= len(pairs) * 2 * 2
    assert (ranking.pairs, ranking.ties) == (len(pairs), 0)
    assert set(ranking.rates) == set(NAMES) and sum(ranking.rates.values()) == pytest.approx(1.5)
    with pytest.raises(SpecError, match="name two at least"):
        draw_method_pairs(setup, NAMES[:1])
