# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""The first update's own forward is compared, and all ranks learn of a difference; verl's engine is a stand-in."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

PROMPT = 2


def jagged(*rows: list[float]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


@pytest.fixture
def engine(cpu_platform, monkeypatch):
    """An actor with the feature. ``forward`` has one micro-batch, whose trainer's values are ``trained``."""
    from jetrl_verl.train import tripwire

    of_ranks = [None]

    def gather(answers, answer):
        answers[:] = [answer, *of_ranks]

    monkeypatch.setattr(tripwire.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(tripwire.dist, "all_gather_object", gather)
    options = SimpleNamespace(old_log_probs="rollout")
    config = SimpleNamespace(jetrl=SimpleNamespace(options=options))
    engine = SimpleNamespace(
        engine_config=config, checkpoint_manager=SimpleNamespace(checkpoint_save_contents=["model"])
    )
    engine.tripwire = tripwire.Tripwire(engine)
    engine.feature = lambda kind: SimpleNamespace(scales={})  # the weight sync, of a policy without adapters
    engine.of_ranks, engine.options = of_ranks, options
    rollout = [[-0.5, -1.5, -2.5], [-0.25]]
    engine.trained = [list(row) for row in rollout]
    fields = {
        "prompts": jagged(*([7] * PROMPT for _ in rollout)),
        "responses": jagged([1, 2, 3], [4]),
        "response_mask": jagged([1, 0, 1], [1]),
        "old_log_probs": jagged(*rollout),
    }
    engine.data = TensorDict(fields, batch_size=2)

    def stock(data, loss_function, forward_only):
        # An entry belongs to the token that follows it.
        rows = [[0.0] * (PROMPT - 1) + row + [0.0] for row in engine.trained]
        return loss_function(model_output={"log_probs": jagged(*rows)}, data=data, dp_group="group")

    engine.update = lambda: engine.tripwire.forward_backward_batch(
        stock, engine.data, lambda **words: words["dp_group"]
    )
    engine.infer = lambda: engine.tripwire.infer_batch(lambda data: data, engine.data)
    return engine


def test_a_difference_stops_the_first_update_after_each_sampled_batch(engine):
    from jetrl_verl.algorithms.old_log_probs import LogProbsDiffer

    engine.infer()
    assert engine.update() == "group"
    engine.trained[0][2] = -2.0
    assert engine.update() == "group", "a later update has other weights"
    engine.infer()
    with pytest.raises(LogProbsDiffer) as raised:
        engine.update()
    (difference,) = raised.value.args
    assert (difference.prompt, difference.response, difference.sampled) == ([7, 7], [1, 2, 3], [1, 0, 1])
    assert (difference.token, difference.rollout[2], difference.trainer[2]) == (2, -2.5, -2.0)
    assert (difference.differing, difference.compared) == (1, 3)


def test_tokens_of_older_weights_are_not_compared(engine):
    from jetrl_verl.algorithms.old_log_probs import SAMPLED_NOW, LogProbsDiffer

    engine.data[SAMPLED_NOW] = jagged([0, 0, 1], [1])
    engine.trained[0][0] = -9.0
    engine.infer()
    assert engine.update() == "group" and engine.data["response_mask"].values().tolist() == [1, 0, 1, 1]
    engine.trained[0][2] = -2.0
    engine.infer()
    with pytest.raises(LogProbsDiffer) as raised:
        engine.update()
    assert (raised.value.args[0].token, raised.value.args[0].compared) == (2, 2)


def test_a_rank_without_a_difference_raises_that_of_another(engine):
    from jetrl_verl.algorithms.old_log_probs import LogProbsDiffer

    engine.of_ranks[:] = ["of rank 1"]
    engine.infer()
    with pytest.raises(LogProbsDiffer, match="of rank 1"):
        engine.update()


def test_computed_log_probs_need_no_second_comparison(engine):
    engine.options.old_log_probs, engine.of_ranks[:] = "compute", ["not asked"]
    engine.infer()
    assert engine.update() == "group"


@pytest.mark.parametrize(("folder", "contents"), [("actor", ["model"]), ("stopped_policy", ["hf_model"])])
def test_a_stopped_run_saves_its_policy_in_hugging_faces_format_alone(engine, tmp_path, folder, contents):
    engine.tripwire.save_checkpoint(lambda path, *rest: None, str(tmp_path / folder), None, 3, None)
    assert engine.checkpoint_manager.checkpoint_save_contents == contents
