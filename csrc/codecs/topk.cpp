// topk: its options, and the codec on the CPU. Which values travel is found in topk_select.h, how
// they travel is in topk_record.h.
#include "codecs/topk.h"

#include <cmath>

#include "codecs/cuda.h"
#include "codecs/options.h"
#include "codecs/registry.h"
#include "codecs/topk_record.h"
#include "codecs/topk_scratch.h"
#include "core/error.h"

namespace pycomm::codecs::topk {
namespace {

constexpr std::string_view kValues[] = {"float32", "float16", "int8", "int2"};
constexpr std::string_view kIndices[] = {"int32", "int16", "int12", "bitmap"};
constexpr uint32_t kChunk12 = 4096;
constexpr uint32_t kChunk16 = 65536;
constexpr int kMaxStride = 65536;

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
