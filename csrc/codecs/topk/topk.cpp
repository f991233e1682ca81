// topk: its options, and the codec on the CPU. The values that travel are selected in
// topk/select.h, and written and read in topk/record.h.
#include "codecs/topk/topk.h"

#include <charconv>

#include "codecs/base/launch.h"
#include "codecs/base/options.h"
#include "codecs/topk/record.h"
#include "codecs/topk/scratch.h"
#include "core/error.h"

namespace pycomm::codecs::topk {
namespace {

constexpr std::string_view kValues[] = {"float32", "int8", "bins2"};
constexpr std::string_view kIndices[] = {"int32", "int12"};

// ---------------------------------------------------- launches in CUDA (topk.cu)

/// Launches of one call.
class Launcher {
 public:
  /// `feedback` and `add` are the template argument of most kernels.
  Launcher(const Format& format, const TopkParams& given, bool flag, const Stream& stream)
      : params(given), flag_(flag), stream_(stream) {
    const size_t numel = params.numel;
    params.length = format.length(numel);
    params.k = format.count(params.length);
    params.last_k = format.count(numel % params.length);
    params.values = static_cast<uint32_t>(format.values);
    params.indices = static_cast<uint32_t>(format.indices);
  }

  void start(const char* kernel, size_t size, size_t tile) const {
    launch("topk", std::string("topk::") + kernel, params, size, tile, stream_);
  }
  void flagged(const char* kernel, size_t size, size_t tile) const {
    start(kernel_name(kernel, flag_).c_str(), size, tile);
  }

  TopkParams params;

 private:
  bool flag_;
  const Stream& stream_;
};

class TopK final : public Codec {
 public:
  explicit TopK(const Format& format) : format_(format) {}

  std::string_view name() const override { return "topk"; }
  std::string spec() const override {
    return "topk:density=" + number_text(format_.density) +
           ",values=" + std::string(kValues[static_cast<int>(format_.values)]) +
           ",indices=" + std::string(kIndices[static_cast<int>(format_.indices)]);
  }
  Combine combine() const override { return Combine::gather; }
  int wire_version() const override { return kWireVersion; }
  size_t granule() const override { return format_.chunks() ? kChunk : 0; }

  size_t scratch_bytes(size_t numel) const override {
    if (numel == 0 || format_.chunks()) return 0;
    return 4 * Layout(numel, format_.count(numel)).words;
  }

  size_t encoded_bytes(size_t numel) const override {
    if (numel == 0) return 0;
    const size_t length = format_.length(numel);
    const size_t rest = numel % length;
    return numel / length * record(length).bytes + (rest ? record(rest).bytes : 0);
  }

 private:
  void encode_cpu(const EncodeArgs& args) const override {
    Selector selector(void_bits(format_.values));
    uint8_t* to = args.out.data;
    for_each_record(args.in.size, [&](const Record& record, size_t first) {
      const float* const residual = args.residual.floats();
      const Source from{args.in.data + first, residual ? residual + first : nullptr, record.n};
      float* const fresh = residual ? args.residual.fresh_floats() + first : nullptr;
      encode_record(record, selector, from, fresh, to);
      to += record.bytes;
    });
  }
  void decode_cpu(Span<const uint8_t> payload, Span<float> out, bool add) const override {
    const auto decode_one = add ? decode_record<true> : decode_record<false>;
    const uint8_t* from = payload.data;
    for_each_record(out.size, [&](const Record& record, size_t first) {
      decode_one(record, from, out.data + first);
      from += record.bytes;
    });
  }

  void encode_cuda(const EncodeArgs& args) const override {
    const bool feedback = args.has_residual();
    const Launcher to(format_, staged_params<TopkParams>(args), feedback, args.stream);
    const size_t numel = args.in.size;
    if (format_.chunks()) return to.flagged("encode_chunks", numel, kChunk / cuda::kWarps);
    to.start("clear_kernel", kCleared, kClearTile);
    if (feedback) {
      to.start("first_kernel", numel, kTile);
    } else {
      to.start("sample_kernel", numel, kSampleOf * kStep);
    }
    to.flagged("keep_kernel", numel, kTile);
    to.start("refill_kernel", numel, kTile);
    to.start("second_kernel", numel, kTile);
    to.start("third_kernel", numel, kTile);
    to.start("count_kernel", numel, kTile);
    to.start("scan_kernel", 1, 1);
    to.start("choose_kernel", numel, kTile);
    to.flagged("pack_kernel", to.params.k, kGroup);
  }
  void decode_cuda(Span<const uint8_t> payload, Span<float> out, bool add,
                   const Stream& stream) const override {
    const Launcher to(format_, staged_params<TopkParams>(payload, out, stream), add, stream);
    if (format_.chunks()) return to.flagged("decode_chunks", out.size, kChunk / cuda::kWarps);
    to.start("clear_kernel", kCleared, kClearTile);
    to.start("check_kernel", to.params.k, cuda::kLanes);
    to.flagged("fill_kernel", out.size, kStep);
    to.flagged("scatter_kernel", to.params.k, cuda::kLanes);
  }

  Record record(size_t n) const {
    if (n > UINT32_MAX) {
      throw Error(spec() + ": " + std::to_string(n) +
                  " values in one tensor; use indices=int12 beyond 2^32");
    }
    return {format_.values, format_.indices, n, format_.count(n)};
  }

  /// Calls f(record, place of its first value) for each record.
  template <typename F>
  void for_each_record(size_t numel, F&& f) const {
    const size_t length = format_.length(numel);
    const Record whole = record(length);
    size_t first = 0;
    for (; numel - first >= length; first += length) f(whole, first);
    if (first < numel) f(record(numel - first), first);
  }

  Format format_;
};

}  // namespace

size_t Format::count(size_t n) const {
  // digits * n is below 10^17 * 2^64 < 10^37, so with more places than that less than one value
  // travels.
  __extension__ using Wide = unsigned __int128;
  if (places > 37) return 1;
  Wide unit = 1;
  for (uint32_t i = 0; i < places; i++) unit *= 10;
  const auto share = static_cast<size_t>((Wide{digits} * n + (unit - 1)) / unit);
  return std::max<size_t>(1, std::min(n, share));
}

namespace {

/// Sets `digits` and `places` of the shortest decimal number that equals the density.
void set_decimal(Format& format) {
  char text[32];
  const auto scientific = std::chars_format::scientific;  // d.ddde-dd; 17 digits at most
  const char* end = std::to_chars(text, text + sizeof text, format.density, scientific).ptr;
  const char* mark = std::find(static_cast<const char*>(text), end, 'e');
  int exponent = 0;
  std::from_chars(mark + (mark[1] == '+' ? 2 : 1), end, exponent);
  format.digits = 0;
  for (const char* at = text; at < mark; at++) {
    if (*at != '.') format.digits = format.digits * 10 + static_cast<uint64_t>(*at - '0');
  }
  const auto behind = std::max<std::ptrdiff_t>(mark - text - 2, 0);  // the point
  format.places = static_cast<uint32_t>(static_cast<int>(behind) - exponent);
}

}  // namespace

std::unique_ptr<Codec> make(Options& options) {
  Format format;
  format.density = options.number("density", 0.01);
  if (!(format.density > 0 && format.density <= 1)) {
    options.fail("density=" + number_text(format.density) + ": use more than 0 and at most 1");
  }
  set_decimal(format);
  format.values =
      static_cast<Values>(options.choice("values", {kValues[0], kValues[1], kValues[2]}, 0));
  format.indices = static_cast<Indices>(options.choice("indices", {kIndices[0], kIndices[1]}, 0));
  options.finish();
  return std::make_unique<TopK>(format);
}

}  // namespace pycomm::codecs::topk
