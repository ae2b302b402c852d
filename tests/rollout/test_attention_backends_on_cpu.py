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
"""vLLM finds the attention backends by module and qualified name, which is how its CUDA platform asks for them."""

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from jetrl_verl.rollout import attention


@pytest.mark.parametrize(
    ("register", "name"),
    [
        (attention._register_cpu, AttentionBackendEnum.CPU_ATTN),
        (attention._register_flash_attention, AttentionBackendEnum.FLASH_ATTN),
    ],
)
def test_a_registered_backend_is_found_by_its_full_name(register, name, monkeypatch):
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", dict(registry._ATTN_OVERRIDES))
    register()
    backend = name.get_class()
    assert backend.__module__ == attention.__name__
    assert resolve_obj_by_qualname(".".join(backend.full_cls_name())) is backend
