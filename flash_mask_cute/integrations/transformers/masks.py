"""The mask half: the mask functions of transformers as arguments of attention.

A function (causal, sliding, chunked, packed, overlays) becomes a window, column intervals, or a
mask_mod, once for all layers that share the mask. For one query it is evaluated for all keys, with
a few small operators and without a wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import masking_utils

from flash_mask_cute.integrations.transformers.packed import packed_columns
from flash_mask_cute.lowering.lower import lower_mod
from flash_mask_cute.lowering.watch import is_capturing
from flash_mask_cute.masks.builders import from_mask_mod
from flash_mask_cute.masks.column_mask import ColumnMask
from flash_mask_cute.masks.mask_mods import mask_of_band
from flash_mask_cute.parallel.sharding import current_sharding

MaskFunction = Callable[..., Any]
MOST_DENSE = 1 << 31  # elements of a dense mask, a byte each
# Models with layers that join a mask with their own, and leave out a `BlockMask` without a word.
_TAKE_TENSORS = ("doge",)
_NO_TENSOR = (
    "masks of flash_mask_cute are no tensors, and this model computes with its mask; load it with "
    "attn_implementation='sdpa' or 'eager'"
)
_NOT_GENERATED = (
    "masks_for(..., mask=...) is no tensor. generate() does not take it, because it says nothing "
    "about tokens that are generated later, and neither does a model that computes with its mask. "
    "Call the model itself"
)


class Found(NamedTuple):
    """A mask as arguments of attention.

    form: in words. left: how many keys before its own a query sees of columns, None for all. row:
    (batch, 1, 1, keys), what the only query sees. used: the keys of each batch entry that it may
    see, int32 (batch,), in a cache that is longer.
    """

    form: str
    window: tuple[int | None, int | None] | None = None
    columns: ColumnMask | None = None
    left: int | None = None
    mask_mod: MaskFunction | None = None
    row: Tensor | None = None
    used: Tensor | None = None


class _NoTensorError(NotImplementedError, AttributeError):
    """A mask is asked for what only a tensor has. `hasattr` is False."""


class AttentionMask(BlockMask):
    """A mask of transformers, as the attention half takes it.

    It is a `BlockMask` without lists, because transformers passes nothing else on to the layers.
    shape: (batch, 1, queries, keys). A model that computes with its mask gets an error.
    """

    _refusal = _NO_TENSOR

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        function: MaskFunction,
        found: Found,
        device: torch.device,
    ) -> None:
        # BlockMask.__init__ wants lists
        self.seq_lengths = shape[2:]
        self.found = found
        self.device = device
        self._shape = shape
        self._function = function
        self._packed: tuple[Any, AttentionMask] | None = None
        self._dense: Tensor | None = None
        # makes this mask for so many keys, where a cache may have been measured on another layer
        self.behind: Callable[[int], AttentionMask] | None = None
        # whether positions.py looked at the position_ids of its forward
        self.has_known_positions = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def form(self) -> str:
        return self.found.form

    @property
    def ndim(self) -> int:
        return len(self._shape)

    def dim(self) -> int:
        return len(self._shape)

    def size(self, dim: int | None = None) -> Any:
        size = torch.Size(self._shape)
        return size if dim is None else size[dim]

    def __repr__(self) -> str:
        return f"AttentionMask(shape={self._shape}, {self.form})"

    __str__ = __repr__

    def __getitem__(self, index: Any) -> AttentionMask:
        """The mask of some rows, mask[:, :, rows, :] with a slice of step 1; nothing else."""
        whole = slice(None)
        is_of_rows = isinstance(index, tuple) and len(index) == 4 and isinstance(index[2], slice)
        if not is_of_rows or (index[0], index[1], index[3]) != (whole,) * 3:
            raise NotImplementedError(f"attention_mask[{index!r}]: {self._refusal}")
        batch, heads, num_rows, num_keys = self._shape
        first, end, step = index[2].indices(num_rows)
        if step != 1:
            raise NotImplementedError(f"attention_mask[{index!r}]: {self._refusal}")
        count = max(end - first, 0)
        if count == num_rows:
            return self
        function = _placed(self._function, first, 0)
        found = find_form(function, batch, (count, num_keys), self.device)
        return AttentionMask((batch, heads, count, num_keys), function, found, self.device)

    def __getattr__(self, name: str) -> Any:
        raise _NoTensorError(f"attention_mask.{name}: {self._refusal}")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tensor | int | float):
            raise _NoTensorError(f"attention_mask in eq: {self._refusal}")
        return self is other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        raise NotImplementedError(f"attention_mask in {name}: {cls._refusal}")

    def to(self, *args: Any, **options: Any) -> AttentionMask:
        """The mask on a device. accelerate calls it where layers are on several devices."""
        dtypes = [x for x in (*args, options.get("dtype")) if isinstance(x, torch.dtype | Tensor)]
        if dtypes:
            raise _NoTensorError(f"attention_mask.to({dtypes[0]}): {self._refusal}")
        device = args[0] if args else options.get("device")
        target = self.device if device is None else torch.empty(0, device=device).device
        if target == self.device:
            return self
        found = self.found
        moved = found._replace(
            columns=None if found.columns is None else found.columns.to(target),
            row=None if found.row is None else found.row.to(target),
            used=None if found.used is None else found.used.to(target),
        )
        if found.mask_mod is not None:
            raise NotImplementedError(
                f"attention_mask is {self.form} on {self.device}, whose function reads tensors "
                f"there, and a layer is on {target}: put all layers on one device"
            )
        return type(self)(self._shape, self._function, moved, target)

    def packed(self, cu_seqlens: Tensor) -> AttentionMask:
        """This mask and the documents of cu_seqlens; made once for a tensor."""
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                f"cu_seq_lens_q beside a mask made before ({self.form}) in a compiled region: let "
                "the mask have the documents, masks_for(..., position_ids=...), and pass no "
                "cu_seq_lens_q and cu_seq_lens_k"
            )
        if self._shape[2:] == (1, 1):
            return self
        if self._packed is None or self._packed[0] is not cu_seqlens:
            _, _, num_rows, num_keys = self._shape
            if num_rows != num_keys:
                raise ValueError(
                    "cu_seq_lens_q and cu_seq_lens_k are for packed rows without a cache, got "
                    f"{num_rows} queries and {num_keys} keys"
                )
            ids = document_ids(cu_seqlens, num_keys)
            function = self._function

            def in_documents(b: Any, h: Any, q: Any, k: Any) -> Any:
                return function(b, h, q, k) & (ids[q] == ids[k])

            found = find_form(in_documents, self._shape[0], self._shape[2:], self.device)
            made = AttentionMask(self._shape, in_documents, found, self.device)
            self._packed = cu_seqlens, made
        return self._packed[1]

    def dense(self) -> Tensor:
        """Bool (batch, 1, queries, keys), False where a score is hidden; made once."""
        if self._dense is None:
            batch, _, num_rows, num_keys = self._shape
            if batch * num_rows * num_keys > MOST_DENSE:
                raise NotImplementedError(
                    f"a dense mask of shape {self._shape} for sdpa has more than {MOST_DENSE} "
                    f"elements; the mask became {self.form}"
                )
            self._dense = self._made_dense()
        return self._dense

    def _made_dense(self) -> Tensor:
        if self.found.row is not None:
            return self.found.row
        return create_mask(self._function, *self._shape, str(self.device))


def _refusing(operator: str) -> Callable[..., NoReturn]:
    def refuse(self: AttentionMask, *others: Any) -> NoReturn:
        raise _NoTensorError(f"attention_mask in {operator}: {self._refusal}")

    return refuse


_OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "and", "rand", "or", "ror",
    "xor", "rxor", "invert", "neg", "lt", "le", "gt", "ge", "len", "iter", "setitem",
)  # fmt: skip
for _operator in _OPERATORS:
    setattr(AttentionMask, f"__{_operator}__", _refusing(_operator))


class CallersMask(AttentionMask):
    """A ColumnMask of the caller, in place of the mask that transformers composes."""

    _refusal = _NOT_GENERATED

    def __getitem__(self, index: Any) -> NoReturn:
        raise NotImplementedError(f"attention_mask[{index!r}]: {self._refusal}")

    def packed(self, cu_seqlens: Tensor) -> NoReturn:
        raise NotImplementedError(
            "cu_seq_lens_q beside masks_for(..., mask=...) is not supported: say in mask which "
            "documents see each other, and pass no cu_seq_lens_q and cu_seq_lens_k"
        )

    def _made_dense(self) -> Tensor:
        columns, left = self.found.columns, self.found.left
        assert columns is not None
        batch, _, num_rows, num_keys = self._shape
        if columns.startend_row_indices.shape[1] != 1:
            raise NotImplementedError(
                f"mask has {columns.startend_row_indices.shape[1]} heads, and a layer that sdpa "
                "computes needs one mask for all heads"
            )
        shown = columns.dense(num_rows).expand(batch, 1, num_rows, num_keys)
        if left is not None:
            places = torch.arange(num_keys, device=self.device)
            shown = shown & (places >= places[:, None] - left)
        return shown


class CallersMasks(dict[str, AttentionMask]):
    """By the kind of layers."""

    @property
    def shape(self) -> NoReturn:
        raise NotImplementedError(f"attention_mask.shape: {_NOT_GENERATED}")


def document_ids(cu_seqlens: Tensor, num_keys: int) -> Tensor:
    """The number of the document of each token, int64 (num_keys,)."""
    place = torch.arange(num_keys, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(place, cu_seqlens, right=True)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> AttentionMask | Tensor | None:
    """The mask half, with the arguments of `AttentionMaskInterface`.

    In a region that torch.compile traces the mask is a dense tensor, as that of sdpa, or None for a
    causal mask without padding over as many keys as queries. Models of `_TAKE_TENSORS` get a dense
    tensor always.

    Raises:
        ValueError: attention_mask is no (batch, keys) tensor.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            "attention_mask must have shape (batch, keys), or (batch, 1 or heads, queries, keys), "
            f"got {tuple(attention_mask.shape)}"
        )
    if current_sharding() is not None:
        # rows of a rank say nothing of the whole sequence
        if attention_mask is not None and not bool(attention_mask.all()):
            raise NotImplementedError(
                "attention_mask has padding inside parallel.sharded: say it in the mask of sharded"
            )
        return None
    takes_tensors = getattr(others.get("config"), "model_type", None) in _TAKE_TENSORS
    if torch.compiler.is_compiling() or takes_tensors:
        # elsewhere transformers hides keys after the first ones by the alignment of a None
        skips = others.pop("allow_is_causal_skip", True) and q_length == kv_length
        skips = skips and not takes_tensors
        made: Tensor | None = masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=skips, device=device, **others,
        )  # fmt: skip
        return made
    device = torch.device(device)
    shape = batch_size, 1, q_length, kv_length
    padding = attention_mask
    if padding is not None:
        missing = kv_length + kv_offset - padding.shape[1]
        if missing > 0:
            # keys that a static cache does not hold yet
            padding = torch.nn.functional.pad(padding, (0, missing))
    is_row = q_length == 1 and not others.get("use_vmap")
    if isinstance(q_offset, Tensor) and not is_row:
        # a static cache moves it in place, and other rows and functions are read after that
        q_offset = q_offset.clone()
    unpadded = _placed(mask_function, q_offset, kv_offset)
    shown = None if padding is None else padding[:, kv_offset : kv_offset + kv_length]
    function = unpadded if shown is None else _padded(unpadded, shown)
    if is_row:
        in_static_cache = isinstance(q_offset, Tensor)
        found = _find_row(unpadded, shown, batch_size, kv_length, device, in_static_cache)
    else:
        lengths = q_length, kv_length
        window = None if shown is None else _find_padded_window(unpadded, shown, lengths, device)
        found = window or find_form(function, batch_size, lengths, device)
    mask = AttentionMask(shape, function, found, device)
    kinds = getattr(others.get("config"), "layer_types", None) or ()
    if "linear_attention" in kinds and q_length == kv_length and not isinstance(q_offset, Tensor):
        # MiniMax measures its cache on layer 0. If this is linear, there are no keys.
        @functools.cache
        def behind(num_keys: int) -> Any:
            count = num_keys if attention_mask is None else attention_mask.shape[1]
            return make_mask(
                batch_size, q_length, count, count - q_length, mask_function=mask_function,
                attention_mask=attention_mask, device=device, **others,
            )  # fmt: skip

        mask.behind = behind
    return mask


def _placed(function: MaskFunction, q_offset: int | Tensor, kv_offset: int) -> MaskFunction:
    """A mask function of places in the whole sequence as one of rows and keys of a call."""
    if isinstance(q_offset, int) and q_offset == kv_offset == 0:
        return function

    def shifted(b: Any, h: Any, q: Any, k: Any) -> Any:
        return function(b, h, q + q_offset, k + kv_offset)

    return shifted


def _padded(function: MaskFunction, shown: Tensor) -> MaskFunction:
    """shown: (batch, keys), False for padding."""

    def padded(b: Any, h: Any, q: Any, k: Any) -> Any:
        return function(b, h, q, k) & shown[b, k]

    return padded


def _find_row(
    function: MaskFunction,
    padding: Tensor | None,
    batch: int,
    num_keys: int,
    device: torch.device,
    in_static_cache: bool,
) -> Found:
    """padding: (batch, num_keys). in_static_cache: find how many keys come up to the last one that
    is visible, too."""
    places = torch.arange(max(batch, num_keys), device=device)
    b, k = places[:batch, None, None, None], places[:num_keys]
    zero = places[:1, None, None, None]
    row = function(b, zero, zero, k)
    if padding is not None:
        row = row & padding[:, None, None]
    row = row.expand(batch, 1, 1, num_keys)
    used = (row[:, 0, 0] * (k + 1).int()).amax(1) if in_static_cache else None
    return Found("a row of keys", row=row, used=used)


def _find_padded_window(
    function: MaskFunction, shown: Tensor, lengths: tuple[int, int], device: torch.device
) -> Found | None:
    """A window, and column intervals where padding hides a key; None if the function is no window.

    shown: (batch, keys). It waits for the device once, and not in the capture of a CUDA graph.
    """
    lowered = lower_mod(function, "mask_mod", device)
    window = None if lowered.band is None else lowered.band.as_window(*lengths)
    if lowered.band is None or window is None:
        return None
    if not is_capturing() and bool(shown.all()):
        return Found(lowered.form, window=window)
    with torch.inference_mode(False):
        band = mask_of_band(lowered.band, lengths, device)
        # a hidden key is hidden from row 0 on
        indices = band.startend_row_indices.where(shown[:, None, :, None], 0)
        columns = ColumnMask(indices, band.causal, False, lengths[0], one_sequence=True)
    return Found("column intervals", columns=columns)


def find_form(
    function: MaskFunction, batch: int, lengths: tuple[int, int], device: torch.device
) -> Found:
    """A window or column intervals where these express a mask function, else the function.

    lengths: of queries and keys. It waits for the device at most once, and not in the capture of a
    CUDA graph, where only windows are found.
    """
    if lengths[0] == lengths[1] and not is_capturing():
        packed = packed_columns(function, batch, lengths[0], device)
        if packed is not None:
            return Found("documents, by column intervals", columns=packed)
    lowered = lower_mod(function, "mask_mod", device)
    window = None if lowered.band is None else lowered.band.as_window(*lengths)
    if window is not None:
        return Found(lowered.form, window=window)
    columns = None
    if lowered.columns is not None and not (lowered.columns.captured and is_capturing()):
        columns = from_mask_mod(function, *lengths, batch=batch, device=device)
    if columns is None:
        return Found("a mask_mod", mask_mod=function)
    documents = "documents, by " if columns.documents else ""
    return Found(f"{documents}column intervals", columns=columns)
