// topk on the CPU: which values travel is found in topk_select.h, how they travel is here.
#include "codecs/topk.h"

#include <cmath>

#include "codecs/cuda.h"
#include "codecs/options.h"
#include "codecs/registry.h"
#include "codecs/topk_scratch.h"
#include "codecs/topk_select.h"
#include "core/error.h"
#include "core/float16.h"

namespace pycomm::codecs::topk {
namespace {

constexpr std::string_view kValues[] = {"float32", "float16", "int8", "int2"};
constexpr std::string_view kIndices[] = {"int32", "int16", "int12", "bitmap"};
constexpr uint32_t kChunk12 = 4096;
constexpr uint32_t kChunk16 = 65536;
constexpr int kMaxStride = 65536;

// ------------------------------------------------------------------- encoding

void write_indices(Indices form, const uint32_t* index, size_t first, size_t n, uint8_t* section) {
  if (form == Indices::int32) {
    std::memcpy(section + 4 * first, index, 4 * n);
  } else if (form == Indices::int16) {
    auto* to = reinterpret_cast<uint16_t*>(section) + first;
    for (size_t j = 0; j < n; j++) to[j] = static_cast<uint16_t>(index[j]);
  } else if (form == Indices::int12) {
    uint8_t* to = section + first / 2 * 3;  // groups begin at even places
    for (size_t j = 0; j < n; j += 2, to += 3) {
      const uint32_t odd = j + 1 < n ? index[j + 1] : 0;
      const uint32_t both = index[j] | odd << 12;
      to[0] = static_cast<uint8_t>(both);
      to[1] = static_cast<uint8_t>(both >> 8);
      if (j + 1 < n) to[2] = static_cast<uint8_t>(both >> 16);
    }
  } else {
    for (size_t j = 0; j < n; j++) {
      section[index[j] / 8] |= static_cast<uint8_t>(1u << index[j] % 8);
    }
  }
}

/// Writes the values p of one group and returns what they decode to in `value`.
void write_values(const Record& record, uint8_t* to, size_t first, const float* p, size_t n,
                  float* value) {
  uint8_t* codes = to + record.values_at;
  auto* scales = reinterpret_cast<float*>(to);
  switch (record.values) {
    case Values::float32:
      std::memcpy(codes + 4 * first, p, 4 * n);
      std::memcpy(value, p, 4 * n);
      break;
    case Values::float16: {
      auto* half = reinterpret_cast<uint16_t*>(codes) + first;
      for (size_t j = 0; j < n; j++) {
        half[j] = static_cast<uint16_t>(Float16::encode(p[j]));
        value[j] = Float16::decode(half[j]);
      }
      break;
    }
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
    case Values::int2: {
      uint32_t least = kInfBits;
      for (size_t j = 0; j < n; j++) least = std::min(least, magnitude_bits(p[j]));
      const float low = bits_float(least);
      const float high = max_magnitude(p, n);
      scales[first / kGroup * 2] = low;
      scales[first / kGroup * 2 + 1] = high;
      std::memset(codes + first / 4, 0, (n + 3) / 4);
      for (size_t j = 0; j < n; j++) {
        const uint32_t code = quantize2(p[j], low, high);
        codes[(first + j) / 4] |= static_cast<uint8_t>(code << 2 * (j % 4));
        value[j] = dequantize2(code, low, high);
      }
    }
  }
}

/// Takes the chosen values of one record, group by group.
class Writer {
 public:
  /// `residual`, `owed`: those of the record; null without feedback.
  Writer(const Record& record, uint8_t* to, const float* residual, float* owed)
      : record_(record), to_(to), residual_(residual), owed_(owed) {
    if (record.indices == Indices::bitmap) {
      std::memset(to + record.indices_at, 0, record.bytes - record.indices_at);
    }
  }

  void group(const uint32_t* index, const float* p, size_t n) {
    alignas(64) float value[kGroup];
    write_values(record_, to_, count_, p, n, value);
    write_indices(record_.indices, index, count_, n, to_ + record_.indices_at);
    count_ += n;
    if (!owed_) return;
    for (size_t j = 0; j < n; j++) owed_[index[j]] = owed(p[j], value[j], residual_[index[j]]);
  }

 private:
  const Record& record_;
  uint8_t* to_;
  const float* residual_;
  float* owed_;
  size_t count_ = 0;
};

void write_void(const Record& record, uint8_t* to) {
  std::memset(to, 0, record.bytes);
  if (record.values == Values::float16) {
    auto* half = reinterpret_cast<uint16_t*>(to);
    std::fill(half, half + record.k, static_cast<uint16_t>(Float16::kNan));
  } else {
    const size_t nans = record.values == Values::float32 ? record.k : record.values_at / 4;
    auto* word = reinterpret_cast<uint32_t*>(to);
    std::fill(word, word + nans, kNanBits);
  }
}

void encode_record(const Record& record, const Cut& cut, const Source& from, float* new_residual,
                   uint8_t* to) {
  if (cut.is_void) {
    write_void(record, to);
    if (from.residual) std::memmove(new_residual, from.residual, 4 * record.n);
    return;
  }
  // The writer leaves the padding; the sections end less than a word into it.
  std::memset(to + record.indices_at - 4, 0, 4);
  std::memset(to + record.bytes - 4, 0, 4);
  Writer writer(record, to, from.residual, new_residual);
  walk(from, cut, new_residual, writer);
}

// ------------------------------------------------------------------- decoding

/// Reads the indices of a record, in order. Those of a bitmap must have been counted before.
class IndexReader {
 public:
  IndexReader(const Record& record, const uint8_t* from)
      : form_(record.indices), section_(from + record.indices_at) {}

  void next(uint32_t* index, size_t n) {
    if (form_ == Indices::int32) {
      std::memcpy(index, section_ + 4 * done_, 4 * n);
    } else if (form_ == Indices::int16) {
      const auto* from = reinterpret_cast<const uint16_t*>(section_) + done_;
      for (size_t j = 0; j < n; j++) index[j] = from[j];
    } else if (form_ == Indices::int12) {
      const uint8_t* from = section_ + done_ / 2 * 3;
      for (size_t j = 0; j < n; j++) {
        const uint8_t* two = from + j / 2 * 3 + j % 2;
        index[j] = (two[0] | two[1] << 8) >> (j % 2 * 4) & 0xfff;
      }
    } else {
      const auto* words = reinterpret_cast<const uint32_t*>(section_);
      for (size_t j = 0; j < n; j++) {
        while (left_ == 0) left_ = words[word_++];
        index[j] =
            static_cast<uint32_t>((word_ - 1) * 32) + static_cast<uint32_t>(__builtin_ctz(left_));
        left_ &= left_ - 1;
      }
    }
    done_ += n;
  }

 private:
  Indices form_;
  const uint8_t* section_;
  size_t done_ = 0;
  size_t word_ = 0;
  uint32_t left_ = 0;  ///< bits of the bitmap's last word that are not read yet
};

/// True if the indices ascend and lie in the record.
bool well_formed(const Record& record, const uint8_t* from) {
  if (record.indices == Indices::bitmap) {
    const auto* words = reinterpret_cast<const uint32_t*>(from + record.indices_at);
    const size_t size = (record.bytes - record.indices_at) / 4;
    size_t ones = 0;
    for (size_t i = 0; i < size; i++) ones += static_cast<size_t>(__builtin_popcount(words[i]));
    const bool beyond = record.n % 32 != 0 && words[size - 1] >> record.n % 32 != 0;
    return ones == record.k && !beyond;
  }
  IndexReader reader(record, from);
  uint32_t index[kGroup];
  int64_t before = -1;
  bool ascend = true;
  for (size_t first = 0; first < record.k; first += kGroup) {
    const size_t n = std::min<size_t>(kGroup, record.k - first);
    reader.next(index, n);
    for (size_t j = 0; j < n; j++) {
      ascend &= index[j] > before;
      before = index[j];
    }
  }
  return ascend && before < static_cast<int64_t>(record.n);
}

void read_values(const Record& record, const uint8_t* from, size_t first, size_t n, float* value) {
  const uint8_t* codes = from + record.values_at;
  const auto* scales = reinterpret_cast<const float*>(from);
  switch (record.values) {
    case Values::float32:
      std::memcpy(value, codes + 4 * first, 4 * n);
      break;
    case Values::float16: {
      const auto* half = reinterpret_cast<const uint16_t*>(codes) + first;
      for (size_t j = 0; j < n; j++) value[j] = Float16::decode(half[j]);
      break;
    }
    case Values::int8: {
      const float s = scales[first / kGroup];
      for (size_t j = 0; j < n; j++) {
        value[j] = dequantize8(static_cast<int8_t>(codes[first + j]), s);
      }
      break;
    }
    case Values::int2: {
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
  if (begins_with_nan(record.values, from) || !well_formed(record, from)) {
    std::fill(out, out + record.n, bits_float(kNanBits));
    return;
  }
  IndexReader reader(record, from);
  alignas(64) uint32_t index[kGroup];
  alignas(64) float value[kGroup];
  size_t filled = 0;  // zeros come just ahead of the values, while the cache has the place
  for (size_t first = 0; first < record.k; first += kGroup) {
    const size_t n = std::min<size_t>(kGroup, record.k - first);
    reader.next(index, n);
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

// ---------------------------------------------------------------------- codec

class TopK final : public Codec {
 public:
  explicit TopK(const Format& format) : format_(format) {}

  std::string_view name() const override { return "topk"; }
  std::string spec() const override {
    return "topk:density=" + number_text(format_.density) +
           ",values=" + std::string(kValues[static_cast<int>(format_.values)]) +
           ",indices=" + std::string(kIndices[static_cast<int>(format_.indices)]) +
           (format_.chunk ? ",chunk=" + std::to_string(format_.chunk) : "") +
           (format_.sample ? ",sample=" + std::to_string(format_.sample) : "");
  }
  Combine combine() const override { return Combine::gather; }
  int wire_version() const override { return kWireVersion; }
  size_t granule() const override { return format_.chunk; }

  bool variable() const override { return format_.sample != 0; }

  size_t scratch_bytes(size_t numel) const override {
    if (numel == 0) return 0;
    const size_t length = format_.length(numel);
    const size_t k = variable() ? format_.most(numel) : format_.count(length);
    return 4 * Layout(numel, length, k, format_.chunk != 0).words;
  }

  size_t encoded_bytes(size_t numel) const override {
    if (numel == 0) return 0;
    if (variable()) return kHeader + record_of(numel, format_.most(numel)).bytes;
    const size_t length = format_.length(numel);
    const size_t rest = numel % length;
    return numel / length * record(length).bytes + (rest ? record(rest).bytes : 0);
  }

  void encode(const EncodeArgs& args) const override {
    check_encode(*this, args);
    check_call(args.in.size, args.stream);
    if (args.in.size == 0) return;
    if (args.stream.device == Device::cuda) return encode_cuda(format_, args);
    if (variable()) return encode_sampled(args);
    Finder finder(format_.length(args.in.size), void_bits(format_.values));
    uint8_t* to = args.out.data;
    for_each_record(args.in.size, [&](const Record& record, size_t first) {
      const bool feedback = args.residual != nullptr;
      const Source from{args.in.data + first, feedback ? args.residual + first : nullptr, record.n};
      encode_record(record, finder.find(from, record.k), from,
                    feedback ? args.new_residual + first : nullptr, to);
      to += record.bytes;
    });
  }
  void decode(Span<const uint8_t> payload, Span<float> out, Stream stream) const override {
    decode_all<false>(payload, out, stream);
  }
  void decode_add(Span<const uint8_t> payload, Span<float> out, Stream stream) const override {
    decode_all<true>(payload, out, stream);
  }

 private:
  Record record_of(size_t n, size_t k) const { return {format_.values, format_.indices, n, k}; }
  Record record(size_t n) const { return record_of(n, format_.count(n)); }

  void encode_sampled(const EncodeArgs& args) const {
    const Source from{args.in.data, args.residual, args.in.size};
    size_t k = 0;
    const Cut cut =
        sampled_cut(from, format_.sample, format_.count((from.n - 1) / format_.sample + 1),
                    format_.most(from.n), void_bits(format_.values), k);
    const Record record = record_of(from.n, cut.is_void ? 1 : k);
    const uint32_t header[] = {static_cast<uint32_t>(kHeader + record.bytes),
                               static_cast<uint32_t>(record.k)};
    std::memcpy(args.out.data, header, kHeader);
    encode_record(record, cut, from, args.new_residual, args.out.data + kHeader);
    zero_padding(args.out, header[0]);
  }

  template <bool kAdd>
  void decode_sampled(Span<const uint8_t> payload, Span<float> out) const {
    uint32_t header[2];
    std::memcpy(header, payload.data, kHeader);
    const size_t k = header[1];
    if (k >= 1 && k <= format_.most(out.size)) {
      const Record record = record_of(out.size, k);
      if (header[0] == kHeader + record.bytes) {
        return decode_record<kAdd>(record, payload.data + kHeader, out.data);
      }
    }
    std::fill(out.begin(), out.end(), bits_float(kNanBits));
  }

  /// Calls f(record, place of its first value).
  template <typename F>
  void for_each_record(size_t numel, F&& f) const {
    const size_t length = format_.length(numel);
    const Record whole = record(length);
    size_t first = 0;
    for (; numel - first >= length; first += length) f(whole, first);
    if (first < numel) f(record(numel - first), first);
  }

  void check_call(size_t numel, const Stream& stream) const {
    check_scratch(*this, numel, stream);
    if (format_.chunk == 0 && numel > UINT32_MAX) {
      throw Error(spec() + ": " + std::to_string(numel) +
                  " values in one tensor; use chunk=65536 beyond 2^32");
    }
  }

  template <bool kAdd>
  void decode_all(Span<const uint8_t> payload, Span<float> out, Stream stream) const {
    check_decode(*this, payload, out);
    check_call(out.size, stream);
    if (out.size == 0) return;
    if (stream.device == Device::cuda) return decode_cuda(format_, payload, out, kAdd, stream);
    if (variable()) return decode_sampled<kAdd>(payload, out);
    const uint8_t* from = payload.data;
    for_each_record(out.size, [&](const Record& record, size_t first) {
      decode_record<kAdd>(record, from, out.data + first);
      from += record.bytes;
    });
  }

  Format format_;
};

}  // namespace

size_t Format::count(size_t n) const {
  const auto share = static_cast<size_t>(std::ceil(density * static_cast<double>(n)));
  return std::max<size_t>(1, std::min(n, share));
}

size_t Format::most(size_t n) const { return std::min(n, count(n) + (count(n) + 3) / 4); }

std::unique_ptr<Codec> make(Options& options) {
  Format format;
  format.density = options.number("density", 0.01);
  if (!(format.density > 0 && format.density <= 1)) {
    options.fail("density=" + number_text(format.density) + ": use more than 0 and at most 1");
  }
  format.values = static_cast<Values>(
      options.choice("values", {kValues[0], kValues[1], kValues[2], kValues[3]}, 0));
  // 0 is auto, the others are one more than their number.
  const int form =
      options.choice("indices", {"auto", kIndices[0], kIndices[1], kIndices[2], kIndices[3]}, 0);
  const int chunk = options.integer("chunk", 0);
  if (chunk != 0 && chunk != kChunk12 && chunk != kChunk16) {
    options.fail("chunk=" + std::to_string(chunk) + ": use 0 (whole tensors), 4096 or 65536");
  }
  format.chunk = static_cast<uint32_t>(chunk);
  if (form > 0) {
    format.indices = static_cast<Indices>(form - 1);
    if (chunk == 0 && format.indices != Indices::int32) {
      format.chunk = format.indices == Indices::int12 ? kChunk12 : kChunk16;
    }
    if ((format.indices == Indices::int32 && chunk != 0) ||
        (format.indices == Indices::int12 && format.chunk != kChunk12)) {
      options.fail(
          "indices=" + std::string(kIndices[form - 1]) + " with chunk=" + std::to_string(chunk) +
          ": int32 goes with chunk=0, int12 with 4096, int16 and bitmap with either chunk");
    }
  } else if (chunk != 0) {
    const double bits = chunk == kChunk12 ? 12 : 16;
    format.indices = format.density * bits > 1 ? Indices::bitmap
                     : chunk == kChunk12       ? Indices::int12
                                               : Indices::int16;
  }
  const int sample = options.integer("sample", 0);
  if (sample < 0 || sample > kMaxStride || (sample > 0 && format.chunk != 0)) {
    options.fail("sample=" + std::to_string(sample) +
                 ": use 0 (exactly the largest) or 1 to 65536, and no chunks");
  }
  format.sample = static_cast<uint32_t>(sample);
  options.finish();
  return std::make_unique<TopK>(format);
}

}  // namespace pycomm::codecs::topk
