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
"""``jetrl diff``: where rollout and trainer differ, which operation differs first, and what each kind contributes.

``rollout`` runs vLLM in a process of its own and records it, ``trainer`` builds the Hugging Face model as the engine
does, ``attribution`` compares and corrects, ``report`` says it, ``run`` is the command.
"""


class DiffError(Exception):
    """The comparison cannot be made; the message is one sentence: what is wrong, what to do."""
