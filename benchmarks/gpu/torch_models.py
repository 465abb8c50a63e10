"""The models of `benchmarks.models` in PyTorch, trained in float32 and as `torch.amp` documents mixed precision."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention

from benchmarks.models import Shape


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.causal, width = shape.heads, not shape.patch, shape.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.patch, width = shape.patch, shape.width
        self.blocks, self.norm = nn.Sequential(*(Block(shape) for _ in range(shape.layers))), nn.LayerNorm(width)
        self.positions = nn.Parameter(0.02 * torch.randn(shape.tokens + bool(shape.patch), width))
        if shape.patch:
            self.patches = nn.Conv2d(3, width, shape.patch, shape.patch)
            self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
            self.head = nn.Linear(width, shape.classes)
        else:
            self.embed = nn.Embedding(shape.classes, width)
            nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.patch:
            x = self.patches(inputs).flatten(2).mT
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
            return self.head(self.norm(self.blocks(x))[:, 0])
        return linear(self.norm(self.blocks(self.embed(inputs) + self.positions)), self.embed.weight)


def data(shape: Shape, batch: int, device: str) -> tuple[Tensor, Tensor]:
    if shape.patch:
        side = shape.patch * round(shape.tokens**0.5)
        images = torch.randn(batch, 3, side, side, device=device)
        return images, torch.randint(shape.classes, (batch,), device=device)
    size = (batch, shape.tokens)
    return torch.randint(shape.classes, size, device=device), torch.randint(shape.classes, size, device=device)


def advance(shape: Shape, batch: int, device: str, name: str, backend: str) -> Callable[[int], None]:
    """Trains so many steps and waits for the last; the model is compiled by `torch.compile`."""
    half = [dtype for dtype in (torch.float16, torch.bfloat16) if str(dtype).removeprefix("torch.") in name]
    dtype, precision = half[0] if half else None, "highest" if name == "torch float32" else "high"
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision == "high"  # of the convolution over patches
    inputs, targets = data(shape, batch, device)
    model = Transformer(shape).to(device)
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    scaler = torch.amp.GradScaler(device, enabled="GradScaler" in name)

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = cross_entropy(compiled(inputs).flatten(0, -2), targets.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def steps(count: int) -> None:
        for _ in range(count):
            step()
        if device == "cuda":
            torch.cuda.synchronize()

    return steps
