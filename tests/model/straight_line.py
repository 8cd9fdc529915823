"""A second K3: one straight function in fp64, written from the formulas alone, token by token, expert by expert.

It shares no code with the package except the parameter names of the state dict. Slow on purpose.
"""

import math

import torch


def rms(x, weight, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def act(cfg, gate, up):
    if cfg.activation == "swiglu":
        return gate * torch.sigmoid(gate) * up
    b1, b2 = cfg.situ_beta, cfg.situ_linear_beta
    capped = up if b2 is None else b2 * torch.tanh(up / b2)
    return b1 * torch.tanh(gate / b1) * torch.sigmoid(gate) * capped


def kda_layer(cfg, w, x_TD):
    c = cfg.kda
    H, K, V = c.num_heads, c.head_dim, c.value_dim
    raw = x_TD @ w["qkv_proj.weight"].T
    taps = w["qkv_conv"]
    T, W = len(x_TD), taps.shape[1]
    conv = torch.zeros_like(raw)
    for t in range(T):
        for j in range(W):
            if t - (W - 1) + j >= 0:
                conv[t] = conv[t] + taps[:, j] * raw[t - (W - 1) + j]
    conv = conv * torch.sigmoid(conv)
    z = (x_TD @ w["f_a_proj.weight"].T) @ w["f_b_proj.weight"].T + w["dt_bias"]
    beta = torch.sigmoid(x_TD @ w["b_proj.weight"].T)
    if c.output_gate_rank is None:
        gate = torch.sigmoid(x_TD @ w["g_proj.weight"].T)
    else:
        gate = torch.sigmoid((x_TD @ w["g_a_proj.weight"].T) @ w["g_b_proj.weight"].T)
    rows = []
    memory = [torch.zeros(K, V, dtype=x_TD.dtype) for _ in range(H)]
    for t in range(T):
        heads = []
        for h in range(H):
            q = conv[t, h * K : (h + 1) * K]
            k = conv[t, H * K + h * K : H * K + (h + 1) * K]
            v = conv[t, 2 * H * K + h * V : 2 * H * K + (h + 1) * V]
            q = q / math.sqrt(float((q * q).sum()) + 1e-6) / math.sqrt(K)
            k = k / math.sqrt(float((k * k).sum()) + 1e-6)
            slope = math.exp(float(w["A_log"][h]))
            logit = z[t, h * K : (h + 1) * K]
            if c.gate_lower_bound is None:
                g = -slope * torch.log1p(torch.exp(logit))
            else:
                g = c.gate_lower_bound / (1 + torch.exp(-slope * logit))
            S = torch.exp(g)[:, None] * memory[h]
            S = S + beta[t, h] * torch.outer(k, v - S.T @ k)
            memory[h] = S
            heads.append(rms(S.T @ q, w["o_norm"], cfg.norm_eps) * gate[t, h * V : (h + 1) * V])
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ w["o_proj.weight"].T


def mla_layer(cfg, w, x_TD):
    c = cfg.mla
    n, r, d = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    if c.q_lora_rank is None:
        q_all = x_TD @ w["q_proj.weight"].T
    else:
        q_all = rms(x_TD @ w["q_a_proj.weight"].T, w["q_a_norm.weight"], c.lora_norm_eps) @ w["q_b_proj.weight"].T
    both = x_TD @ w["kv_a_proj.weight"].T
    latent = rms(both[:, : c.kv_lora_rank], w["kv_a_norm.weight"], c.lora_norm_eps)
    shared = both[:, c.kv_lora_rank :]
    up = latent @ w["kv_b_proj.weight"].T
    outs = []
    for h in range(c.num_heads):
        q = q_all[:, h * (n + r) : (h + 1) * (n + r)]
        part = up[:, h * (n + d) : (h + 1) * (n + d)]
        k = torch.cat([part[:, :n], shared], dim=1)
        out = []
        for t in range(len(x_TD)):
            p = torch.softmax(q[t] @ k[: t + 1].T / math.sqrt(n + r), dim=0)
            out.append(p @ part[: t + 1, n:])
        outs.append(torch.stack(out))
    o = torch.cat(outs, dim=1)
    if c.output_gate:
        o = o * torch.sigmoid(x_TD @ w["g_proj.weight"].T)
    return o @ w["o_proj.weight"].T


def mlp(cfg, w, at, x):
    return act(cfg, x @ w[at + "gate_proj.weight"].T, x @ w[at + "up_proj.weight"].T) @ w[at + "down_proj.weight"].T


def moe_layer(cfg, w, x_TD):
    c = cfg.moe
    rows = []
    for x in x_TD:
        s = torch.sigmoid(w["router.weight"] @ x)
        order = sorted(range(c.num_experts), key=lambda e: (-float(s[e] + w["router.bias"][e]), e))
        chosen = order[: c.experts_per_token]
        total = sum(s[e] for e in chosen) if c.renormalize else 1.0
        z = x if c.latent_size is None else w["down_proj.weight"] @ x
        r = torch.zeros_like(z)
        for e in chosen:
            hidden = act(cfg, w["experts.w1"][e] @ z, w["experts.w3"][e] @ z)
            r = r + s[e] / total * c.routed_scaling_factor * (w["experts.w2"][e] @ hidden)
        if c.latent_size is not None:
            if c.latent_norm:
                r = rms(r, w["norm.weight"], cfg.norm_eps)
            r = w["up_proj.weight"] @ r
        if c.num_shared_experts:
            r = r + mlp(cfg, w, "shared.", x)
        rows.append(r)
    return torch.stack(rows)


def depth_read(cfg, w, at, sources):
    c = w[at + "norm"] * w[at + "query"]
    scores = torch.stack([(v @ c) / torch.sqrt((v * v).mean(-1) + cfg.norm_eps) for v in sources])
    p = torch.softmax(scores, dim=0)
    return sum(p[i][:, None] * sources[i] for i in range(len(sources)))


def straight_line_logits(cfg, state_dict, ids):
    """fp64 logits `[T, Z]` of one sequence; the four residual forms are each written out on their own."""
    w = {name: value.double() for name, value in state_dict.items()}

    def sub(prefix):
        return {name[len(prefix) :]: value for name, value in w.items() if name.startswith(prefix)}

    def mixer(layer, x):
        part = sub(f"layers.{layer}.mixer.")
        x = rms(x, w[f"layers.{layer}.mixer_norm.weight"], cfg.norm_eps)
        return (kda_layer if cfg.layer_mixers[layer] == "kda" else mla_layer)(cfg, part, x)

    def ffn(layer, x):
        part = sub(f"layers.{layer}.ffn.")
        x = rms(x, w[f"layers.{layer}.ffn_norm.weight"], cfg.norm_eps)
        return mlp(cfg, part, "", x) if cfg.layer_ffns[layer] == "dense" else moe_layer(cfg, part, x)

    emb = w["embed.weight"][ids]
    if cfg.residual == "plain":
        h = emb
        for layer in range(cfg.num_layers):
            h = h + mixer(layer, h)
            h = h + ffn(layer, h)
    elif cfg.residual == "block":
        outputs, bank, live = {}, [], emb
        for layer in range(cfg.num_layers):
            a = mixer(layer, depth_read(cfg, w, f"layers.{layer}.mixer_read.", [*bank, live]))
            if layer % cfg.attn_res_block_layers == 0:
                bank.append(live)
                live = a
            else:
                live = live + a
            live = live + ffn(layer, depth_read(cfg, w, f"layers.{layer}.ffn_read.", [*bank, live]))
            outputs[layer] = live
        h = depth_read(cfg, w, "output_read.", [*bank, live])
    elif cfg.residual == "full":
        done = [emb]  # embedding and the whole output of each finished decoder layer
        for layer in range(cfg.num_layers):
            a = mixer(layer, depth_read(cfg, w, f"layers.{layer}.mixer_read.", done))
            m = ffn(layer, depth_read(cfg, w, f"layers.{layer}.ffn_read.", [*done, a]))
            done.append(a + m)
        h = depth_read(cfg, w, "output_read.", done)
    else:
        done = [emb]
        for layer in range(cfg.num_layers):
            done.append(mixer(layer, depth_read(cfg, w, f"layers.{layer}.mixer_read.", done)))
            done.append(ffn(layer, depth_read(cfg, w, f"layers.{layer}.ffn_read.", done)))
        h = depth_read(cfg, w, "output_read.", done)
    return rms(h, w["norm.weight"], cfg.norm_eps) @ w["lm_head.weight"].T
