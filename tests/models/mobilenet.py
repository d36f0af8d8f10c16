"""MobileNetV5 in plain torch, with timm's names and on pictures [1, colours, height, width]: what
transformers computes by timm, which need not be installed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COMMON = {"act_layer": None, "noskip": False, "se_ratio": 0.0}


def edge(size: int, stride: int = 1) -> dict[str, Any]:
    return {
        **COMMON,
        "block_type": "er",
        "out_chs": size,
        "stride": stride,
        "exp_kernel_size": 3,
        "pw_kernel_size": 1,
        "exp_ratio": 2.0,
        "force_in_chs": 0,
    }


def inverted(size: int, first: int, kernel: int, stride: int = 1) -> dict[str, Any]:
    return {
        **COMMON,
        "block_type": "uir",
        "out_chs": size,
        "stride": stride,
        "dw_kernel_size_start": first,
        "dw_kernel_size_mid": kernel,
        "dw_kernel_size_end": 0,
        "exp_ratio": 2.0,
    }


def query(size: int, num_heads: int, key_stride: int) -> dict[str, Any]:
    return {
        "act_layer": None,
        "noskip": False,
        "block_type": "mqa",
        "out_chs": size,
        "stride": 1,
        "dw_kernel_size": 3,
        "num_heads": num_heads,
        "key_dim": 8,
        "value_dim": 8,
        "kv_stride": key_stride,
    }


# Every kind of block of the released network.
BLOCKS = [
    [edge(8, 2), edge(8)],
    [inverted(16, 3, 5, 2), inverted(16, 5, 0), query(16, 3, 2), inverted(16, 0, 0)],
    [inverted(24, 5, 5, 2), query(24, 2, 1), inverted(24, 0, 0)],
]
OUT_SIDE = 4
MODEL_ARGS = {"stem_size": 8, "block_args": BLOCKS, "msfa_output_resolution": OUT_SIDE}
OUT_SIZE = 2_048  # timm has no other
SIDE = 64  # pixels of a side
SIDES = (32, 64)  # without a mean at the end, and with one


class VisionTower(nn.Module):
    """In place of transformers' wrapper of timm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.timm_model = MobileNet()

    def forward(self, pixel_values: Tensor, **others: Any) -> Any:
        return Wrapped(self.timm_model(pixel_values))


class Wrapped:
    def __init__(self, found: Tensor) -> None:
        self.last_hidden_state = found
        self.pooler_output: Tensor | None = None


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_stem = NormedConv(3, 8, 3, bias=True)
        stages = []
        size = 8
        for stage in BLOCKS:
            blocks = []
            for block in stage:
                blocks.append(KINDS[block["block_type"]](size, block))
                size = block["out_chs"]
            stages.append(nn.Sequential(*blocks))
        self.blocks = nn.Sequential(*stages)
        self.msfa = Fusion()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_stem(x, 2)
        found = []
        for stage in self.blocks:
            x = stage(x)
            found.append(x)
        return self.msfa(found[-2], found[-1])  # type: ignore[no-any-return]


def same(x: Tensor, conv: nn.Conv2d, stride: int) -> Tensor:
    """The convolution whose outputs are as many as inputs, but for the stride."""
    kernel = conv.kernel_size[0]
    sides = []
    for length in x.shape[:1:-1]:
        num = max((-(-length // stride) - 1) * stride + kernel - length, 0)
        sides += [num // 2, num - num // 2]
    return F.conv2d(F.pad(x, sides), conv.weight, conv.bias, stride, groups=conv.groups)


class PixelNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        squares = x.pow(2).mean(1, keepdim=True)
        return x * torch.rsqrt(squares + 1e-6) * self.weight.view(1, -1, 1, 1)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class NormedConv(nn.Module):
    def __init__(
        self, in_size: int, size: int, kernel: int = 1, groups: int = 1, bias: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_size, size, kernel, groups=groups, bias=bias)
        self.bn = PixelNorm(size)

    def forward(self, x: Tensor, stride: int = 1, bends: bool = True) -> Tensor:
        x = self.bn(same(x, self.conv, stride))
        return gelu(x) if bends else x


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma.view(-1, 1, 1)


class Edge(nn.Module):
    def __init__(self, in_size: int, args: dict[str, Any]) -> None:
        super().__init__()
        size = args["out_chs"]
        self.stride = args["stride"]
        self.is_added = self.stride == 1 and in_size == size
        self.conv_exp = nn.Conv2d(in_size, 2 * in_size, 3, bias=False)
        self.bn1 = PixelNorm(2 * in_size)
        self.conv_pwl = nn.Conv2d(2 * in_size, size, 1, bias=False)
        self.bn2 = PixelNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        wide = gelu(self.bn1(same(x, self.conv_exp, self.stride)))
        found = self.bn2(self.conv_pwl(wide))
        return x + found if self.is_added else found


class Inverted(nn.Module):
    def __init__(self, in_size: int, args: dict[str, Any]) -> None:
        super().__init__()
        size = args["out_chs"]
        inner = 2 * in_size
        self.stride = args["stride"]
        self.is_added = self.stride == 1 and in_size == size
        first, middle = args["dw_kernel_size_start"], args["dw_kernel_size_mid"]
        self.dw_start = NormedConv(in_size, in_size, first, in_size) if first else None
        self.pw_exp = NormedConv(in_size, inner)
        self.dw_mid = NormedConv(inner, inner, middle, inner) if middle else None
        self.pw_proj = NormedConv(inner, size)
        self.layer_scale = Scale(size)

    def forward(self, x: Tensor) -> Tensor:
        found = x
        if self.dw_start is not None:
            found = self.dw_start(found, bends=False)
        found = self.pw_exp(found)
        if self.dw_mid is not None:
            found = self.dw_mid(found, self.stride)
        found = self.layer_scale(self.pw_proj(found, bends=False))
        return x + found if self.is_added else found


class KeyConv(nn.Module):
    def __init__(self, in_size: int, args: dict[str, Any]) -> None:
        super().__init__()
        self.stride = args["kv_stride"]
        if self.stride > 1:
            self.down_conv = nn.Conv2d(in_size, in_size, 3, groups=in_size, bias=False)
            self.norm = PixelNorm(in_size)
        self.proj = nn.Conv2d(in_size, args["key_dim"], 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[1, n, H, W] -> [pixels, head_dim]"""
        if self.stride > 1:
            x = self.norm(same(x, self.down_conv, self.stride))
        return self.proj(x)[0].flatten(1).t()  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, in_size: int, args: dict[str, Any]) -> None:
        super().__init__()
        self.num_heads = args["num_heads"]
        size = self.num_heads * args["key_dim"]
        self.query = nn.Sequential()
        self.query.add_module("proj", nn.Conv2d(in_size, size, 1, bias=False))
        self.key = KeyConv(in_size, args)
        self.value = KeyConv(in_size, args)
        self.output = nn.Sequential()
        self.output.add_module("proj", nn.Conv2d(size, args["out_chs"], 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        asked = self.query(x)[0].unflatten(0, (self.num_heads, -1)).flatten(2).transpose(1, 2)
        keys, values = self.key(x), self.value(x)
        shares = (asked @ keys.t() / keys.shape[1] ** 0.5).softmax(-1)
        found = (shares @ values).transpose(1, 2).reshape(1, -1, *x.shape[2:])
        return self.output(found)  # type: ignore[no-any-return]


class Query(nn.Module):
    def __init__(self, in_size: int, args: dict[str, Any]) -> None:
        super().__init__()
        self.norm = PixelNorm(in_size)
        self.attn = Attention(in_size, args)
        self.layer_scale = Scale(args["out_chs"])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer_scale(self.attn(self.norm(x)))


class Fusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = BLOCKS[-2][-1]["out_chs"] + BLOCKS[-1][-1]["out_chs"]
        self.ffn: Any = nn.Module()
        self.ffn.pw_exp = NormedConv(size, 2 * size)
        self.ffn.pw_proj = NormedConv(2 * size, OUT_SIZE)
        self.norm = PixelNorm(OUT_SIZE)

    def forward(self, larger: Tensor, smaller: Tensor) -> Tensor:
        grown = F.interpolate(smaller, larger.shape[2:])
        found = self.ffn.pw_exp(torch.cat((larger, grown), 1))
        found = self.ffn.pw_proj(found, bends=False)
        square = F.avg_pool2d(found, larger.shape[-1] // OUT_SIDE)
        return self.norm(square)  # type: ignore[no-any-return]


KINDS: dict[str, type[nn.Module]] = {"er": Edge, "uir": Inverted, "mqa": Query}
