"""Attention of packed documents for torchtitan (docs/integrations_more.md)."""

from dataclasses import dataclass

from torchtitan.models.common.attention import VarlenAttention

from flash_mask_cute import flash_attn_varlen_func


class MaskCuteAttention(VarlenAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config):
        super(VarlenAttention, self).__init__()
        self.window_size = config.window_size

    def forward(self, q, k, v, *, attention_masks, scale=None, out_transform=None, **_):
        x, (batch, rows) = attention_masks, q.shape[:2]
        out, lse = flash_attn_varlen_func(
            *(y.flatten(0, 1) for y in (q, k, v)),
            *(x.cu_seq_q, x.cu_seq_k, x.max_q, x.max_k),
            softmax_scale=scale,
            window_size=self.window_size,
            return_lse=True,
        )
        out, lse = out.unflatten(0, (batch, rows)), lse.T.unflatten(0, (batch, rows))
        return out if out_transform is None else out_transform(out, lse)
