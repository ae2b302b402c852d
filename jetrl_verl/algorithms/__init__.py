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
"""What the precisions need of the learning algorithm and verl lacks.

``losses`` holds policy losses for a quantised rollout, ``calibrated_clipping`` the clip bounds of the unified FP8 flow,
``shadow`` the BF16 forwards that they are calibrated against, ``invariant_scaling`` QuRL's reparametrisation and
``refusals`` the combinations that contradict each other. Only ``losses`` and ``shadow`` import verl.
"""
