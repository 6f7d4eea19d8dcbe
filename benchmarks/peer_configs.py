"""Configurations as mergekit's users write them: gradients, filters, slices, weights of many kinds.

Folders are given by the names of the models that `peers.py` makes: base, expert-0, expert-1, expert-2, six layers each; and, with
tokenizers, words, words-chat (two tokens more), words-tool (one more), words-turned (the base's tokens, numbered otherwise) and
words-end (a token more that words-chat has too).
"""

from __future__ import annotations

CONFIGS: dict[str, str] = {
    "linear": """
        merge_method: linear
        models:
          - {model: expert-0, parameters: {weight: 0.5}}
          - {model: expert-1, parameters: {weight: 0.3}}
          - {model: expert-2, parameters: {weight: 0.2}}
        dtype: float32
    """,
    "linear, weights that do not sum to 1, the base among the models": """
        merge_method: linear
        models:
          - {model: base, parameters: {weight: 1}}
          - {model: expert-0, parameters: {weight: 2}}
        dtype: float32
    """,
    "linear, weights by layer": """
        merge_method: linear
        models:
          - {model: expert-0, parameters: {weight: [1, 0.5, 0.2]}}
          - {model: expert-1, parameters: {weight: [0.1, 0.6]}}
        dtype: float32
    """,
    "linear, weights by name": """
        merge_method: linear
        models:
          - model: expert-0
            parameters:
              weight:
                - filter: mlp
                  value: [1, 2]
                - filter: self_attn
                  value: 0.25
                - value: 0.5
          - {model: expert-1, parameters: {weight: 0.5}}
        dtype: float32
    """,
    "slerp": """
        merge_method: slerp
        base_model: expert-0
        models: [{model: expert-0}, {model: expert-1}]
        parameters: {t: 0.3}
        dtype: float32
    """,
    "slerp, t by layer and name, as in mergekit's example": """
        slices:
          - sources:
              - model: expert-0
                layer_range: [0, 6]
              - model: expert-1
                layer_range: [0, 6]
        merge_method: slerp
        base_model: expert-0
        parameters:
          t:
            - filter: self_attn
              value: [0, 0.5, 0.3, 0.7, 1]
            - filter: mlp
              value: [1, 0.5, 0.7, 0.3, 0]
            - value: 0.5
        dtype: float32
    """,
    "slerp, the base second": """
        merge_method: slerp
        base_model: expert-1
        models: [{model: expert-0}, {model: expert-1}]
        parameters: {t: 0.8}
        dtype: float32
    """,
    "task_arithmetic": """
        merge_method: task_arithmetic
        base_model: base
        models:
          - {model: expert-0, parameters: {weight: 0.3}}
          - {model: expert-1, parameters: {weight: -0.2}}
          - {model: expert-2, parameters: {weight: 0.7}}
        parameters: {lambda: 0.9}
        dtype: float32
    """,
    "task_arithmetic, one weight for all": """
        merge_method: task_arithmetic
        base_model: base
        models: [{model: base}, {model: expert-0}, {model: expert-1}]
        parameters: {weight: 0.4, int8_mask: true}
        dtype: float32
    """,
    "ties, nothing trimmed, weighted": """
        merge_method: ties
        base_model: base
        models:
          - {model: expert-0, parameters: {weight: 0.5, density: 1.0}}
          - {model: expert-1, parameters: {weight: 0.3, density: 1.0}}
          - {model: expert-2, parameters: {weight: 0.9, density: 1.0}}
        parameters: {normalize: true, int8_mask: true}
        dtype: float32
    """,
    "ties, nothing trimmed, summed": """
        merge_method: ties
        base_model: base
        models:
          - {model: expert-0, parameters: {weight: 0.5}}
          - {model: expert-1, parameters: {weight: 0.3}}
        parameters: {normalize: false}
        dtype: float32
    """,
    "ties, a density each, as in mergekit's example": """
        models:
          - model: expert-0
            parameters:
              density: [1, 0.7, 0.1] # density gradient
              weight: 1.0
          - model: expert-1
            parameters:
              density: 0.5
              weight: [0, 0.3, 0.7, 1] # weight gradient
          - model: expert-2
            parameters:
              density: 0.33
              weight:
                - filter: mlp
                  value: 0.5
                - value: 0
        merge_method: ties
        base_model: base
        parameters:
          normalize: true
          int8_mask: true
        dtype: float32
    """,
    "dare_linear, nothing dropped": """
        merge_method: dare_linear
        base_model: base
        models:
          - {model: expert-0, parameters: {weight: 0.3, density: 1}}
          - {model: expert-1, parameters: {weight: [0.1, 0.9], density: 1}}
        dtype: float32
    """,
    "dare_ties, nothing dropped": """
        merge_method: dare_ties
        base_model: base
        models:
          - {model: expert-0, parameters: {weight: 0.3}}
          - {model: expert-1, parameters: {weight: 0.6}}
          - {model: expert-2, parameters: {weight: 0.2}}
        parameters: {lambda: 1.1}
        dtype: float32
    """,
    "breadcrumbs": """
        merge_method: breadcrumbs
        base_model: base
        models:
          - {model: expert-0, parameters: {weight: 0.4, density: 0.8, gamma: 0.05}}
          - {model: expert-1, parameters: {weight: 0.6, density: 0.9, gamma: 0.05}}
        dtype: float32
    """,
    "breadcrumbs_ties": """
        merge_method: breadcrumbs_ties
        base_model: base
        models:
          - {model: expert-0, parameters: {weight: 0.4, density: 0.8, gamma: 0.02}}
          - {model: expert-1, parameters: {weight: 0.6, density: 0.7, gamma: 0.02}}
        parameters: {normalize: true}
        dtype: float32
    """,
    "della, nothing dropped": """
        merge_method: della
        base_model: base
        models:
          - {model: expert-0, parameters: {weight: 0.4, density: 1}}
          - {model: expert-1, parameters: {weight: 0.6, density: 1}}
        parameters: {lambda: 1.2}
        dtype: float32
    """,
    "della_linear, nothing dropped, normalised": """
        merge_method: della_linear
        base_model: base
        models:
          - {model: expert-0, parameters: {weight: 0.4}}
          - {model: expert-1, parameters: {weight: 0.8}}
        parameters: {normalize: true}
        dtype: float32
    """,
    "model_stock": """
        merge_method: model_stock
        base_model: base
        models: [{model: expert-0}, {model: expert-1}, {model: expert-2}]
        dtype: float32
    """,
    "model_stock, by row": """
        merge_method: model_stock
        base_model: base
        models: [{model: expert-0}, {model: expert-1}]
        parameters: {filter_wise: true}
        dtype: float32
    """,
    "sce": """
        merge_method: sce
        base_model: base
        models: [{model: expert-0}, {model: expert-1}, {model: expert-2}]
        parameters: {select_topk: 0.25}
        dtype: float32
    """,
    "nuslerp of changes": """
        merge_method: nuslerp
        base_model: base
        models:
          - {model: expert-0, parameters: {weight: [0.2, 0.8]}}
          - {model: expert-1, parameters: {weight: 0.5}}
        dtype: float32
    """,
    "nuslerp of weights, by row": """
        merge_method: nuslerp
        models:
          - {model: expert-0, parameters: {weight: 0.7}}
          - {model: expert-1, parameters: {weight: 0.3}}
        parameters: {nuslerp_flatten: false}
        dtype: float32
    """,
    "multislerp of changes": """
        merge_method: multislerp
        base_model: base
        models:
          - {model: expert-0, parameters: {weight: 0.5}}
          - {model: expert-1, parameters: {weight: 0.3}}
          - {model: expert-2, parameters: {weight: 0.2}}
        dtype: float32
    """,
    "multislerp of weights": """
        merge_method: multislerp
        models:
          - {model: expert-0, parameters: {weight: 0.5}}
          - {model: expert-1, parameters: {weight: 0.3}}
        dtype: float32
    """,
    "karcher": """
        merge_method: karcher
        models: [{model: expert-0}, {model: expert-1}, {model: expert-2}]
        parameters: {max_iter: 20, tol: 1e-6}
        dtype: float32
    """,
    "nearswap": """
        merge_method: nearswap
        base_model: base
        models: [{model: expert-1}]
        parameters: {t: 0.001}
        dtype: float32
    """,
    "arcee_fusion": """
        merge_method: arcee_fusion
        base_model: base
        models: [{model: expert-2}]
        dtype: float32
    """,
    "ram": """
        merge_method: ram
        base_model: base
        models: [{model: expert-0}, {model: expert-1}, {model: expert-2}]
        parameters: {epsilon: 0.002}
        dtype: float32
    """,
    "ramplus_tl": """
        merge_method: ramplus_tl
        base_model: base
        models: [{model: expert-0}, {model: expert-1}]
        parameters: {epsilon: 0.002, r: 0.2, alpha: 0.3}
        dtype: float32
    """,
    "passthrough, one model in another dtype": """
        merge_method: passthrough
        models: [{model: expert-0}]
        dtype: bfloat16
    """,
    "passthrough, two models stacked": """
        slices:
          - sources:
              - {model: expert-0, layer_range: [0, 4]}
          - sources:
              - {model: expert-1, layer_range: [2, 6]}
        merge_method: passthrough
        dtype: float32
    """,
    "passthrough, layers repeated and silenced": """
        slices:
          - sources: [{model: expert-0, layer_range: [0, 3]}]
          - sources:
              - model: expert-0
                layer_range: [2, 4]
                parameters:
                  scale:
                    - {filter: o_proj, value: 0.0}
                    - {filter: down_proj, value: 0.0}
                    - value: 1.0
          - sources: [{model: expert-0, layer_range: [3, 6]}]
        merge_method: passthrough
        dtype: float32
    """,
    "linear of slices, layers moved": """
        slices:
          - sources:
              - {model: expert-0, layer_range: [0, 3], parameters: {weight: [0.2, 0.8]}}
              - {model: expert-1, layer_range: [1, 4], parameters: {weight: 0.5}}
          - sources:
              - {model: expert-2, layer_range: [3, 6], parameters: {weight: 1}}
        merge_method: linear
        dtype: float32
    """,
    "ties of slices, each with parameters of its own": """
        slices:
          - sources:
              - {model: base, layer_range: [0, 2]}
              - {model: expert-0, layer_range: [0, 2], parameters: {weight: 0.5}}
              - {model: expert-1, layer_range: [0, 2], parameters: {weight: 0.5}}
          - sources:
              - {model: base, layer_range: [2, 6]}
              - {model: expert-0, layer_range: [2, 6], parameters: {weight: [0, 1]}}
              - {model: expert-1, layer_range: [2, 6], parameters: {weight: 0.3}}
        merge_method: ties
        base_model: base
        parameters: {normalize: false}
        dtype: float32
    """,
    "linear, the tokens of all models": """
        merge_method: linear
        models:
          - {model: words-chat, parameters: {weight: 0.5}}
          - {model: words-tool, parameters: {weight: 0.3}}
          - {model: words-turned, parameters: {weight: 0.2}}
        tokenizer_source: union
        dtype: float32
    """,
    "linear, all tokens, two from elsewhere, padded": """
        merge_method: linear
        models:
          - {model: words-chat, parameters: {weight: 0.6}}
          - {model: words-tool, parameters: {weight: 0.4}}
        tokenizer:
          source: union
          tokens:
            "<|im_start|>":
              source: {kind: model_token, model: words-tool, token: "hello"}
              force: true
            "hello":
              source: words-chat
              force: true
          pad_to_multiple_of: 64
        dtype: float32
    """,
    "task_arithmetic, the base's tokens": """
        merge_method: task_arithmetic
        base_model: words
        models:
          - {model: words-chat, parameters: {weight: 0.4}}
          - {model: words-turned, parameters: {weight: 0.7}}
        tokenizer_source: base
        dtype: float32
    """,
    "ties, nothing trimmed, the tokens of one model": """
        merge_method: ties
        base_model: words
        models:
          - {model: words-chat, parameters: {weight: 0.5}}
          - {model: words-turned, parameters: {weight: 0.3}}
        tokenizer_source: words-chat
        dtype: float32
    """,
    "slerp, the tokens of both models": """
        merge_method: slerp
        base_model: words-chat
        models: [{model: words-chat}, {model: words-tool}]
        parameters: {t: 0.3}
        tokenizer_source: union
        dtype: float32
    """,
    "task_arithmetic, all tokens, one that two models added": """
        merge_method: task_arithmetic
        base_model: words
        models:
          - {model: words-chat, parameters: {weight: 0.4}}
          - {model: words-end, parameters: {weight: 0.7}}
        tokenizer_source: union
        dtype: float32
    """,
    "linear written in bfloat16": """
        merge_method: linear
        models:
          - {model: expert-0, parameters: {weight: 0.5}}
          - {model: expert-1, parameters: {weight: 0.5}}
        dtype: float32
        out_dtype: bfloat16
    """,
}
