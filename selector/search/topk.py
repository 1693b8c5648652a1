"""One pass over each row of logits: its maximum, its log-sum-exp and its best candidates.

The pass works on blocks that stay in the first-level cache. Per block it takes the maximum (as integers, whose order
equals the order of the floats, so that the compiler may vectorise it and NaN is seen), adds up exponentials
relative to the running maximum, and looks for new candidates only where the block's maximum beats the worst one kept.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

BLOCK = 128
ROW_OK, ROW_NAN, ROW_EMPTY = 0, 1, 2
_KEY_POSITIVE_INFINITY = np.int32(0x7F800000)
_KEY_NEGATIVE_INFINITY = np.int32(-0x7F800001)  # ordered key of the bits 0xFF800000
_LOG2_E = np.float32(math.log2(math.e))
_LOWEST_EXPONENT = np.float32(-126.0)


@intrinsic
def _bits_to_float(typingctx: Any, value: Any) -> Any:
    """Reinterpret an int32 as a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@njit(cache=True)
def _ordered(bits):
    """Map the bits of a float32 to an int32 of the same order; the map is its own inverse."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
def _block_sum_exp(block, maximum):
    """Sum of exp(block - maximum) in float32; 2**x by a polynomial of degree 6, relative error under 2e-7."""
    total = np.float32(0.0)
    for i in range(block.shape[0]):
        x = (block[i] - maximum) * _LOG2_E
        x = x if x > _LOWEST_EXPONENT else _LOWEST_EXPONENT
        whole = np.floor(x)
        f = x - whole - np.float32(0.5)  # in [-1/2, 1/2): the polynomial is of 2**(f + 1/2)
        p = np.float32(0.00021865784947294742)
        p = p * f + np.float32(0.001895106746815145)
        p = p * f + np.float32(0.01360198576003313)
        p = p * f + np.float32(0.07849348336458206)
        p = p * f + np.float32(0.3397315740585327)
        p = p * f + np.float32(0.9802581667900085)
        p = p * f + np.float32(1.4142135381698608)
        total += p * _bits_to_float((np.int32(whole) + np.int32(127)) << np.int32(23))  # type: ignore[call-arg]
    return total


@njit(cache=True)
def _block_key_range(bits):
    """Smallest and largest ordered key of a block of float32 bits."""
    low = np.int32(0x7FFFFFFF)
    high = np.int32(-0x7FFFFFFF)
    for i in range(bits.shape[0]):
        key = _ordered(bits[i])
        low = min(low, key)
        high = max(high, key)
    return low, high


@njit(cache=True)
def _insert(block, offset, values, ids, filled):
    """Put the block's candidates into the descending buffer; of equal values the lower id stays in front."""
    capacity = values.shape[0]
    for i in range(block.shape[0]):
        x = block[i]
        if filled == capacity and not x > values[capacity - 1]:
            continue
        if x == -np.inf:
            continue
        j = filled if filled < capacity else capacity - 1
        while j > 0 and x > values[j - 1]:
            values[j] = values[j - 1]
            ids[j] = ids[j - 1]
            j -= 1
        values[j] = x
        ids[j] = offset + i
        filled = min(filled + 1, capacity)
    return filled


@njit(cache=True)
def _scan_row(row, bits, values, ids):
    """One row: returns (filled, maximum, sum of exponentials relative to it, status)."""
    vocab = row.shape[0]
    capacity = values.shape[0]
    maximum = np.float32(-np.inf)
    total = 0.0
    filled = 0
    for start in range(0, vocab, BLOCK):
        stop = min(start + BLOCK, vocab)
        low, high = _block_key_range(bits[start:stop])
        if high > _KEY_POSITIVE_INFINITY or low < _KEY_NEGATIVE_INFINITY:
            return 0, maximum, total, ROW_NAN
        block_maximum: float = _bits_to_float(_ordered(high))  # type: ignore[call-arg]
        if filled < capacity or block_maximum > values[capacity - 1]:
            filled = _insert(row[start:stop], start, values, ids, filled)
        if block_maximum > maximum:
            total *= math.exp(float(maximum) - float(block_maximum)) if maximum > -np.inf else 0.0
            maximum = block_maximum
        if -np.inf < maximum < np.inf:
            total += _block_sum_exp(row[start:stop], maximum)
    return filled, maximum, total, ROW_OK if filled > 0 else ROW_EMPTY


@njit(cache=True)
def _finish_infinite(bits, values, ids, logprobs, token_ids):
    """A row with +inf logits: those share all the mass equally and nothing else can be said."""
    count = 0
    for i in range(bits.shape[0]):
        if bits[i] == _KEY_POSITIVE_INFINITY:
            count += 1
    for j in range(values.shape[0]):
        if values[j] == np.inf:
            logprobs[j] = -math.log(count)
            token_ids[j] = ids[j]


@njit(cache=True)
def _top_k_rows(logits, bits, top_k):
    depth = logits.shape[0]
    token_ids = np.full((depth, top_k), -1, np.int64)
    logprobs = np.full((depth, top_k), -np.inf, np.float64)
    status = np.zeros(depth, np.int64)
    for d in range(depth):
        values = np.full(top_k, -np.inf, np.float32)
        ids = np.full(top_k, -1, np.int64)
        filled, maximum, total, status[d] = _scan_row(logits[d], bits[d], values, ids)
        if status[d] != ROW_OK:
            continue
        if maximum == np.inf:
            _finish_infinite(bits[d], values, ids, logprobs[d], token_ids[d])
            continue
        log_total = float(maximum) + math.log(total)
        for j in range(filled):
            logprobs[d, j] = float(values[j]) - log_total
            token_ids[d, j] = ids[j]
    return token_ids, logprobs, status


def top_k_log_softmax(
    logits: NDArray[np.float32], top_k: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Best candidates of every row with log-probabilities normalised over the whole row.

    Args:
        logits: (depth, vocab) float32, C-contiguous.
        top_k: candidates wanted per row; rows with fewer finite logits are padded with id -1, log-probability -inf.

    Returns:
        token_ids (depth, k) int64, logprobs (depth, k) float64 (absolute error under 1e-6), both in descending order,
        ties by lower id, and status (depth,) of ROW_OK, ROW_NAN or ROW_EMPTY (no logit above -inf), k = min(top_k, vocab).
    """
    k = min(int(top_k), logits.shape[1])
    return _top_k_rows(logits, logits.view(np.int32), k)  # type: ignore[no-any-return]
