# Copyright 2026 The jetrl_verl Authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""vLLM worker extension: receives codes and scales, then checks the contract on live parameters.

verl's own extension loads the buckets; this one wraps it with two duties.

*A failure must reach the trainer.* The trainer's sender waits for an acknowledgement of every bucket, without a time
limit, so a loader that raises in the middle leaves it waiting for ever. Here an exception is kept, the remaining
buckets are acknowledged unread, and it is raised at the end, when the remote call's result carries it to the trainer.

*The contract.* Behind the weights come the trainer's sums (observe/contract.py); they are compared with what the live
parameters hold after loading.
"""

import logging
import time
import traceback

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from jetrl_verl.observe.contract import ContractReceiver, ContractViolation, probe_sum
from jetrl_verl.observe.operations_probe import stated_operations
from jetrl_verl.patches import two_runs
from jetrl_verl.rollout.live import live_tensors
from jetrl_verl.rollout.method import JetFP8Config
from jetrl_verl.rollout.shared_operations import share_sampler

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)
if not logger.handlers:
    # Its own handler: whether the root logger of a vLLM worker has one depends on how the process was started.
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False


class JetWorkerExtension(vLLMColocateWorkerExtension):
    """Extension of ``precision=fp8_rollout``, ``fp8_rollout_tis`` and ``jet_fp8``."""

    def update_weights_from_ipc(self, peft_config: dict | None = None, base_sync_done=False, use_shm: bool = False):
        """One weight sync.

        Raises:
            ContractViolation: live parameters differ from what the trainer states.
            RuntimeError: loading failed; raised after the sender has been let go.
        """
        started = time.perf_counter()
        self._jetrl_receiver = ContractReceiver()
        self._jetrl_failure: str | None = None
        super().update_weights_from_ipc(peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm)
        if self._jetrl_failure is not None:
            raise RuntimeError(f"weight sync: the rollout worker could not load the weights: {self._jetrl_failure}")
        loaded = time.perf_counter()
        config = self.model_runner.vllm_config.quant_config
        if not isinstance(config, JetFP8Config):
            raise ContractViolation(
                "contract check: the trainer sends codes but vLLM was started with quantization="
                f"{config.get_name() if config else None}; do not override rollout.engine_kwargs.vllm.quantization"
            )
        if config.operations == "shared":
            # No hook of vLLM's builds a sampler; a rollout before the first sync has no weights anyway.
            share_sampler(self.model_runner)
        if not config.contract_check:
            logger.info("jetrl weight sync: loaded in %.3f s, contract not checked", loaded - started)
            return
        counts = self._jetrl_receiver.verify(
            live_tensors(self.model_runner.model),
            scale_rule=config.scale_rule,
            probe=probe_sum(self.device, config.scale_rule, config.rollout),
            operations=stated_operations(self.device, config.operations),
        )
        logger.info(
            "jetrl weight sync: loaded in %.3f s, contract of %d quantised and %d BF16 tensors held in %.3f s, "
            "%d not compared, live digest %#018x",
            loaded - started,
            counts["quantised"],
            counts["plain"],
            time.perf_counter() - loaded,
            counts["uncompared"],
            counts["digest"],
        )

    def _get_zmq_handle(self) -> str:
        return two_runs.address_of_this_run(super()._get_zmq_handle())

    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], peft_config: dict, base_sync_done: bool):
        if self._jetrl_failure is not None:
            return
        try:
            rest = self._jetrl_receiver.take(weights)
            if rest:
                super()._update_weights(rest, peft_config=peft_config, base_sync_done=base_sync_done)
        except Exception as error:
            logger.error("jetrl weight sync: loading failed\n%s", traceback.format_exc())
            # Words only: the exception's traceback reaches up to the receiver's frames and their views of the buffer.
            self._jetrl_failure = f"{type(error).__name__}: {error}"
