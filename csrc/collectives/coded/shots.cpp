#include "collectives/coded/shots.h"

#include <algorithm>

#include "collectives/coded/coded.h"
#include "collectives/coded/float32_view.h"
#include "core/error.h"

namespace pycomm::coded {
namespace {

/// Values that are processed at once, so that their sum stays in the cache.
constexpr size_t kTogether = 1 << 14;

size_t aligned(size_t bytes) {
  constexpr size_t kAlign = 256;
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

/// Returns the bytes of the float32 of a run, if its values have another dtype.
size_t float32_bytes(size_t numel, DType dtype) {
  return dtype == DType::float32 ? 0 : aligned(numel * sizeof(float));
}

/// Returns what a kernel needs to sum the contributions of all ranks to a run of `bytes`, and
/// advances to what follows them.
Contributions take(std::vector<Span<const uint8_t>>& left, size_t bytes, float divisor) {
  Contributions sum;
  sum.payloads = left[0].data;
  sum.stride = left.size() > 1 ? left[1].data - left[0].data : 0;
  sum.ranks = static_cast<uint32_t>(left.size());
  sum.divisor = divisor;
  for (Span<const uint8_t>& payload : left) payload = payload.sub(bytes, payload.size - bytes);
  return sum;
}

/// True if payloads begin at equal distances, and each has at least `bytes`.
bool are_even(const std::vector<Span<const uint8_t>>& payloads, size_t bytes) {
  for (size_t r = 0; r < payloads.size(); r++) {
    const size_t stride = payloads.size() > 1 ? payloads[1].data - payloads[0].data : 0;
    if (payloads[r].data != payloads[0].data + r * stride || payloads[r].size < bytes) return false;
  }
  return !payloads.empty();
}

/// Sums the contributions of all ranks in their order, and advances to what follows them.
void add_payloads(Span<const PieceRun> part, const Coder& coder,
                  std::vector<Span<const uint8_t>>& left, Floats sum) {
  for (size_t r = 0; r < left.size(); r++) {
    const size_t used = coder.decode(part, left[r], sum, r > 0, static_cast<int>(r));
    left[r] = left[r].sub(used, left[r].size - used);
  }
}

}  // namespace

void check_runs(Span<const Piece> pieces, Span<const PieceRun> runs) {
  for (const PieceRun& run : runs) {
    if (run.piece >= pieces.size) {
      throw Error("a run is of piece " + std::to_string(run.piece) + ", and there are " +
                  std::to_string(pieces.size));
    }
    const Piece& piece = pieces[run.piece];
    const size_t granule = piece.codec->granule();
    const bool inside = run.offset <= piece.numel && run.numel <= piece.numel - run.offset;
    const bool whole = run.offset == 0 && run.numel == piece.numel;
    const bool last = inside && run.offset + run.numel == piece.numel;
    const bool on_grain = run.offset % kGrain == 0 && (last || run.numel % kGrain == 0);
    const bool on_granule =
        granule && run.offset % granule == 0 && (last || run.numel % granule == 0);
    if (!inside || (!whole && !(on_grain && on_granule))) {
      throw Error("a run of " + std::to_string(run.numel) + " values from " +
                  std::to_string(run.offset) + " on cannot be cut from piece " +
                  std::to_string(run.piece) + ", which has " + std::to_string(piece.numel) +
                  " values and the codec " + piece.codec->spec());
    }
  }
}

Shots::Shots(const CodedArgs& args, size_t rows, int rank, int divisor, Stream stream,
             float* found_inf, const float* swapped)
    : args_(args),
      row_numel_(args.data.size / rows),
      rank_(rank),
      divisor_(divisor),
      stream_(stream),
      found_inf_at_(on_gpu() ? found_inf : &found_inf_) {
  check("coded bucket", args, rows);
  if (on_gpu()) batching_.emplace(swapped);
}

size_t Shots::scratch_bytes(const Piece& piece, size_t numel, DType dtype) {
  const size_t residual = std::max(feedback::scratch_bytes(*piece.codec, piece.worker, numel),
                                   feedback::scratch_bytes(*piece.codec, piece.owner, numel));
  return float32_bytes(numel, dtype) + aligned(residual + piece.codec->scratch_bytes(numel));
}

void Shots::start() {
  if (batching_) batching_->start(stream_);
  scratch_used_ = 0;
}

template <typename F>
void Shots::in_parts(Span<const PieceRun> runs, size_t row, float* found_inf, const F& do_part) {
  const void* const values = this->row(row);
  if (!on_gpu()) {
    const Coder coder(args_, rank_, scratch_);
    const Float32View view(args_, values, divisor_, scratch_, found_inf);
    for (size_t begin = 0, end = 0; begin < runs.size; begin = end) {
      size_t numel = 0;
      do {
        numel += runs[end++].numel;
      } while (end < runs.size && numel + runs[end].numel <= kTogether);
      do_part(runs.sub(begin, end - begin), coder, view);
    }
    return;
  }
  for (size_t i = 0; i < runs.size; i++) {
    const size_t numel = runs[i].numel, floats = float32_bytes(numel, args_.data.dtype);
    const size_t bytes = scratch_bytes(args_.pieces[runs[i].piece], numel, args_.data.dtype);
    if (bytes > stream_.scratch.size) {
      throw Error("a run of " + std::to_string(numel) + " values needs " + std::to_string(bytes) +
                  " bytes of scratch memory, but the stream has " +
                  std::to_string(stream_.scratch.size) + "; ask scratch_bytes()");
    }
    if (bytes > stream_.scratch.size - scratch_used_) start();
    uint8_t* const own = stream_.scratch.data + scratch_used_;
    scratch_used_ += bytes;
    Stream stream = stream_;
    stream.scratch = {own + floats, bytes - floats};
    batching_->row();
    const Coder coder(args_, rank_, scratch_, stream, Packing::fixed);
    float* const room = floats > 0 ? reinterpret_cast<float*>(own) : nullptr;
    do_part(runs.sub(i, 1), coder,
            Float32View(args_, values, divisor_, scratch_, found_inf, stream, room));
  }
}

size_t Shots::contribute(Span<const PieceRun> runs, size_t row, uint8_t* out) {
  size_t bytes = 0;
  in_parts(runs, row, nullptr,
           [&](Span<const PieceRun> part, const Coder& coder, const Float32View& from) {
             bytes += coder.encode(Hop::worker, part, from.read(part), out + bytes, row);
           });
  return bytes;
}

size_t Shots::own(Span<const PieceRun> runs, const std::vector<Span<const uint8_t>>& payloads,
                  uint8_t* out) {
  std::vector<Span<const uint8_t>> left = payloads;
  size_t bytes = 0;
  in_parts(runs, 0, nullptr,
           [&](Span<const PieceRun> part, const Coder& coder, const Float32View& to) {
             const Floats sum = to.room(part);
             const Codec& codec = *args_.pieces[part[0].piece].codec;
             const size_t most = codec.encoded_bytes(part[0].numel);
             if (on_gpu() && codec.fuses_sum() && are_even(left, most)) {
               const float divisor = args_.average ? static_cast<float>(divisor_) : 1.0f;
               const Contributions all = take(left, most, divisor);
               bytes += coder.encode(Hop::owner, part, sum, out + bytes, 0, all);
               return;
             }
             add_payloads(part, coder, left, sum);
             to.average(part, sum);
             bytes += coder.encode(Hop::owner, part, sum, out + bytes);
           });
  return bytes;
}

void Shots::add_up(Span<const PieceRun> runs, const std::vector<Span<const uint8_t>>& payloads) {
  std::vector<Span<const uint8_t>> left = payloads;
  in_parts(runs, 0, found_inf_at_,
           [&](Span<const PieceRun> part, const Coder& coder, const Float32View& to) {
             const Floats sum = to.room(part);
             add_payloads(part, coder, left, sum);
             to.finish_sum(part, sum);
           });
}

void Shots::land(Span<const PieceRun> runs, size_t row, Span<const uint8_t> payload, int sender) {
  in_parts(runs, row, found_inf_at_,
           [&](Span<const PieceRun> part, const Coder& coder, const Float32View& to) {
             const Floats values = to.room(part);
             const size_t used = coder.decode(part, payload, values, false, sender);
             payload = payload.sub(used, payload.size - used);
             to.finish_result(part, values);
           });
}

}  // namespace pycomm::coded
