# Copyright (c) 2018, NVIDIA CORPORATION; Copyright 2018 The OpenAI Team Authors and HuggingFace Inc. team; Copyright
# 2022 EleutherAI and the HuggingFace Inc. team; Copyright 2022 HuggingFace Inc. team and BigScience workshop; Copyright
# 2023 the Falcon authors and HuggingFace Inc. team; Copyright 2024 Microsoft and the HuggingFace Inc. team; Copyright
# 2025 Bytedance-Seed Ltd and the HuggingFace Inc. team; Copyright 2025 IBM and the HuggingFace Inc. team; Copyright
# 2025 Technology Innovation Institute and the HuggingFace Inc. team; Copyright 2025 The HuggingFace Team; Copyright
# 2025 The LLAMA4 and HuggingFace Inc. team; Copyright 2026 The LG AI Research and HuggingFace Inc. team.
#
# Licensed under the Apache License, Version 2.0; you may not use this file except in compliance with the License.
# You may obtain a copy of it at http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on an
# "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""MLPs, and linear layers and activations that families define themselves.

Quoted from transformers without docstrings, annotations and decorators; never imported.
"""

class LlamaMLP:
    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj

class Exaone4_5_MLP:
    def forward(self, hidden_state):
        return self.down_proj(self.act_fn(self.gate_proj(hidden_state)) * self.up_proj(hidden_state))

class Llama4TextMLP:
    def forward(self, x):
        down_proj = self.activation_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(down_proj)

class SeedOssMLP:
    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        down_proj = nn.functional.dropout(down_proj, p=self.residual_dropout, training=self.training)
        return down_proj

class Lfm2MLP:
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

class FalconH1MLP:
    def forward(self, x):
        y = self.up_proj(x) * self.act_fn(self.gate_proj(x) * self.gate_multiplier)
        y = self.down_proj(y) * self.down_multiplier
        return y

class Phi3MLP:
    def forward(self, hidden_states):
        up_states = self.gate_up_proj(hidden_states)
        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * self.activation_fn(gate)
        return self.down_proj(up_states)

class GraniteMoeHybridMLP:
    def forward(self, hidden_states):
        hidden_states = self.input_linear(hidden_states)
        chunked_hidden_states = hidden_states.chunk(2, dim=-1)
        hidden_states = self.activation(chunked_hidden_states[0]) * chunked_hidden_states[1]
        hidden_states = self.output_linear(hidden_states)
        return hidden_states

class GPT2MLP:
    def forward(self, hidden_states):
        hidden_states = self.c_fc(hidden_states)
        hidden_states = self.act(hidden_states)
        hidden_states = self.c_proj(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return hidden_states

class PhiMLP:
    def forward(self, hidden_states):
        hidden_states = self.fc1(hidden_states)
        hidden_states = self.activation_fn(hidden_states)
        hidden_states = self.fc2(hidden_states)
        return hidden_states

class FalconLinear:
    def forward(self, input):
        hidden_states = input @ self.weight.T
        if self.bias is None:
            return hidden_states
        return hidden_states + self.bias

class BloomGelu:
    def forward(self, x):
        return GeLUFunction.apply(x)

class GeLUFunction:
    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return bloom_gelu_forward(input)

    @staticmethod
    def backward(ctx, grad_output):
        input = ctx.saved_tensors
        tmp = bloom_gelu_back(grad_output, input)
        return tmp

def bloom_gelu_forward(x):
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

def bloom_gelu_back(g, x):
    x = x[0]
    tanh_out = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    ff = 0.5 * x * ((1 - tanh_out * tanh_out) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + tanh_out)
    return ff * g
