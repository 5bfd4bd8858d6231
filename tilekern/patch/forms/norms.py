# Copyright (c) 2024, NVIDIA CORPORATION; Copyright 2022 EleutherAI and the HuggingFace Inc. team; Copyright 2024 Cohere
# team; Copyright 2024 EleutherAI and the HuggingFace Inc. team; Copyright 2024 Google Inc. HuggingFace Inc. team;
# Copyright 2024 HuggingFace Inc. team; Copyright 2024 The Kyutai and HuggingFace Inc. teams; Copyright 2025 Arcee AI
# and the HuggingFace Inc. team; Copyright 2025 Kyutai and The HuggingFace Inc. team; Copyright 2025 The HuggingFace
# Inc. team; Copyright 2025 The LLAMA4 and HuggingFace Inc. team; Copyright 2025 The Qwen team, Alibaba Group and the
# HuggingFace Inc. team; Copyright 2026 the HuggingFace Team.
#
# Licensed under the Apache License, Version 2.0; you may not use this file except in compliance with the License.
# You may obtain a copy of it at http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on an
# "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""Norms. Quoted from transformers without docstrings, annotations and decorators; never imported."""

class LlamaRMSNorm:
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)

class AfmoeRMSNorm:
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight * hidden_states).to(input_dtype)

class GemmaRMSNorm:
    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

class HeliumRMSNorm:
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight.to(torch.float32) * hidden_states).to(input_dtype)

class KyutaiSpeechToTextRMSNorm:
    def forward(self, x):
        output = self._norm(x.float())
        output = output * self.weight.float()
        return output.type_as(x)

class Gemma4RMSNorm:
    def forward(self, hidden_states):
        normed_output = self._norm(hidden_states.float())
        if self.with_scale:
            normed_output = normed_output * self.weight.float()
        return normed_output.type_as(hidden_states)

    def _norm(self, hidden_states):
        mean_squared = hidden_states.pow(2).mean(-1, keepdim=True) + self.eps
        return hidden_states * torch.pow(mean_squared, -0.5)

class Gemma3nRMSNorm_5_0_0:
    def forward(self, x):
        output = self._norm(x.float()) * self.weight.float()
        return output.type_as(x)

    def _norm(self, x):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

class Llama4TextRMSNorm:
    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        return output * self.weight

class NanoChatRMSNorm:
    def forward(self, x):
        return self._norm(x.float()).type_as(x)

class Qwen3NextRMSNormGated:
    def forward(self, hidden_states, gate):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight * hidden_states.to(input_dtype)
        hidden_states = hidden_states * ACT2FN[self.activation](gate.to(torch.float32))
        return hidden_states.to(input_dtype)

class CohereLayerNorm:
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        mean = hidden_states.mean(-1, keepdim=True)
        variance = (hidden_states - mean).pow(2).mean(-1, keepdim=True)
        hidden_states = (hidden_states - mean) * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight.to(torch.float32) * hidden_states
        return hidden_states.to(input_dtype)

class NemotronLayerNorm1P:
    def forward(self, input):
        device_type = input.device.type
        args = _cast_if_autocast_enabled(
            device_type, input, self.normalized_shape, self.weight + 1.0, self.bias, self.eps
        )
        with maybe_autocast(device_type=input.device.type, enabled=False):
            return F.layer_norm(*args)

class NemotronLayerNorm1P_5_0_0:
    def forward(self, input):
        device_type = input.device.type if input.device.type != 'mps' else 'cpu'
        args = _cast_if_autocast_enabled(
            device_type, input, self.normalized_shape, self.weight + 1, self.bias, self.eps
        )
        with maybe_autocast(device_type=input.device.type, enabled=False):
            return F.layer_norm(*args)

class StableLmLayerNormPerHead:
    def forward(self, hidden_states):
        states_per_heads = torch.split(hidden_states, 1, dim=1)
        return torch.cat([norm(hidden_states) for norm, hidden_states in zip(self.norms, states_per_heads)], dim=1)

class OlmoLayerNorm:
    def forward(self, hidden_states):
        orig_dtype = hidden_states.dtype
        return F.layer_norm(
            hidden_states.to(dtype=torch.float32), self.normalized_shape, None, None, eps=1e-05).to(orig_dtype
        )
