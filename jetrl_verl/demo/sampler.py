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
"""verl's replay buffer, asking ten times a second whether the rollouts are done instead of every two seconds.

verl 0.9.1 polls at an interval without a setting. Two seconds are nothing to a real recipe but a quarter of a step
here, and they round ``timing_s/gen`` up to multiples of two. ``trainer.v1.sampler.custom_sampler``, verl's own seam,
names the class; it can go when ``poll_interval`` becomes an option.
"""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class AttentiveReplayBuffer(ReplayBuffer):
    """``ReplayBuffer`` with ``poll_interval`` 0.1 s."""

    def __init__(self, **arguments):
        super().__init__(**arguments, poll_interval=0.1)
