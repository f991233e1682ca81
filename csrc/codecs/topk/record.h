// Record of topk on the CPU: how the chosen values are written and read. Included by topk.cpp only.
#pragma once
#include <algorithm>
#include <cstring>

#include "codecs/topk/select.h"

namespace pycomm::codecs::topk {

// ------------------------------------------------------------------- encoding

inline void write_indices(Indices form, const uint32_t* index, size_t first, size_t n,
                          uint8_t* section) {
  if (form == Indices::int32) {
    std::memcpy(section + 4 * first, index, 4 * n);
  } else {
    uint8_t* to = section + first / 2 * 3;  // groups begin at even places
    for (size_t j = 0; j < n; j += 2, to += 3) {
      const uint32_t odd = j + 1 < n ? index[j + 1] : 0;
      const uint32_t both = index[j] | odd << 12;
      to[0] = static_cast<uint8_t>(both);
      to[1] = static_cast<uint8_t>(both >> 8);
      if (j + 1 < n) to[2] = static_cast<uint8_t>(both >> 16);
    }
  }
}

/// Writes the values p of one group and returns what they decode to in `value`.
inline void write_values(const Record& record, uint8_t* to, size_t first, const float* p, size_t n,
                         float* value) {
  uint8_t* codes = to + record.values_at;
  auto* scales = reinterpret_cast<float*>(to);
  switch (record.values) {
    case Values::float32:
      std::memcpy(codes + 4 * first, p, 4 * n);
      std::memcpy(value, p, 4 * n);
      break;
    case Values::int8: {
      const float amax = max_magnitude(p, n);
      const float s = scale(amax, kTop8);
      const float inv = inv_scale(amax, kTop8);
      scales[first / kGroup] = s;
      for (size_t j = 0; j < n; j++) {
        const int code = quantize8(p[j], inv);
        codes[first + j] = static_cast<uint8_t>(code);
        value[j] = dequantize8(code, s);
      }
      break;
    }
    case Values::bins2: {
      const BinScale s = bin_scale(max_magnitude(p, n));
      uint32_t magnitude[kGroup];
      Bins bins;
      bins.count = static_cast<uint32_t>(n);
      for (size_t j = 0; j < n; j++) bins.sum += magnitude[j] = bin_code(p[j], s.inv);
      for (size_t j = 0; j < n; j++) {
        if (!bins.upper(magnitude[j])) continue;
        bins.upper_sum += magnitude[j];
        bins.upper_count++;
      }
      const float low = bins.low(s.scale);
      const float high = bins.high(s.scale);
      scales[first / kGroup * 2] = low;
      scales[first / kGroup * 2 + 1] = high;
      std::memset(codes + first / 4, 0, (n + 3) / 4);
      for (size_t j = 0; j < n; j++) {
        const uint32_t code = (bins.upper(magnitude[j]) ? 1u : 0u) | float_bits(p[j]) >> 31 << 1;
        codes[(first + j) / 4] |= static_cast<uint8_t>(code << 2 * (j % 4));
        value[j] = dequantize2(code, low, high);
      }
    }
  }
}

/// Writes a group of chosen values, and their residuals to that of the record, which has p.
inline void write_group(const Record& record, uint8_t* to, size_t first, const uint32_t* index,
                        const float* p, size_t n, float* new_residual) {
  alignas(64) float value[kGroup];
  write_values(record, to, first, p, n, value);
  write_indices(record.indices, index, first, n, to + record.indices_at);
  if (!new_residual) return;
  // Values of a record that is not void are finite, and decoded they are, too.
  for (size_t j = 0; j < n; j++) new_residual[index[j]] = p[j] - value[j];
}

inline void write_void(const Record& record, uint8_t* to) {
  std::memset(to, 0, record.bytes);
  const size_t nans = record.values == Values::float32 ? record.k : record.values_at / 4;
  auto* word = reinterpret_cast<uint32_t*>(to);
  std::fill(word, word + nans, kNanBits);
}

inline void encode_record(const Record& record, Selector& selector, const Source& from,
                          float* new_residual, uint8_t* to) {
  if (!selector.select(from, record.k, new_residual)) {
    write_void(record, to);
    if (from.residual) std::memmove(new_residual, from.residual, 4 * record.n);
    return;
  }
  // Padding: the sections end less than a word into it.
  std::memset(to + record.indices_at - 4, 0, 4);
  std::memset(to + record.bytes - 4, 0, 4);
  // A caller may change values while they are encoded. More may be chosen then than there is room
  // for; fewer leave at the end what was in the memory before.
  const size_t chosen = std::min(selector.count(), record.k);
  for (size_t first = 0; first < chosen; first += kGroup) {
    write_group(record, to, first, selector.index() + first, selector.p() + first,
                std::min<size_t>(kGroup, chosen - first), new_residual);
  }
}

// ------------------------------------------------------------------- decoding

/// Reads n indices of a record from the first-th on, which is an even one.
inline void read_indices(const Record& record, const uint8_t* from, size_t first, size_t n,
                         uint32_t* index) {
  const uint8_t* section = from + record.indices_at;
  if (record.indices == Indices::int32) {
    std::memcpy(index, section + 4 * first, 4 * n);
    return;
  }
  for (size_t j = 0; j < n; j++) {
    const uint8_t* two = section + first / 2 * 3 + j / 2 * 3 + j % 2;
    index[j] = (two[0] | two[1] << 8) >> (j % 2 * 4) & 0xfff;
  }
}

/// True if the indices ascend and lie in the record.
inline bool well_formed(const Record& record, const uint8_t* from) {
  uint32_t index[kGroup];
  int64_t before = -1;
  bool ascend = true;
  for (size_t first = 0; first < record.k; first += kGroup) {
    const size_t n = std::min<size_t>(kGroup, record.k - first);
    read_indices(record, from, first, n, index);
    for (size_t j = 0; j < n; j++) {
      ascend &= index[j] > before;
      before = index[j];
    }
  }
  return ascend && before < static_cast<int64_t>(record.n);
}

inline void read_values(const Record& record, const uint8_t* from, size_t first, size_t n,
                        float* value) {
  const uint8_t* codes = from + record.values_at;
  const auto* scales = reinterpret_cast<const float*>(from);
  switch (record.values) {
    case Values::float32:
      std::memcpy(value, codes + 4 * first, 4 * n);
      break;
    case Values::int8: {
      const float s = scales[first / kGroup];
      for (size_t j = 0; j < n; j++) {
        value[j] = dequantize8(static_cast<int8_t>(codes[first + j]), s);
      }
      break;
    }
    case Values::bins2: {
      const float* levels = scales + first / kGroup * 2;
      for (size_t j = 0; j < n; j++) {
        const uint32_t code = codes[(first + j) / 4] >> 2 * (j % 4) & 3;
        value[j] = dequantize2(code, levels[0], levels[1]);
      }
    }
  }
}

template <bool kAdd>
void decode_record(const Record& record, const uint8_t* from, float* out) {
  if (begins_with_nan(from) || !well_formed(record, from)) {
    std::fill(out, out + record.n, bits_float(kNanBits));
    return;
  }
  alignas(64) uint32_t index[kGroup];
  alignas(64) float value[kGroup];
  size_t filled = 0;  // zeros are written just ahead of the values, while the cache holds the place
  for (size_t first = 0; first < record.k; first += kGroup) {
    const size_t n = std::min<size_t>(kGroup, record.k - first);
    read_indices(record, from, first, n, index);
    read_values(record, from, first, n, value);
    if (!kAdd) {
      const size_t end = size_t{index[n - 1]} + 1;
      std::memset(out + filled, 0, 4 * (end - filled));
      filled = end;
    }
    for (size_t j = 0; j < n; j++) {
      out[index[j]] = kAdd ? out[index[j]] + value[j] : value[j];
    }
  }
  if (!kAdd) std::memset(out + filled, 0, 4 * (record.n - filled));
}

}  // namespace pycomm::codecs::topk
