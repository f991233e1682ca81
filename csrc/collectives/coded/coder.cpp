#include "collectives/coded/coder.h"

#include <algorithm>
#include <cstring>

#include "collectives/coded/coded.h"
#include "core/error.h"

namespace pycomm::coded {
namespace {

/// Values that the host processes at once, so that their sum stays in the cache.
constexpr size_t kTogether = 1 << 14;
/// The most scratch memory of a GPU that runs share their launches for.
constexpr size_t kScratchBytes = size_t{64} << 20;

size_t aligned(size_t bytes) {
  constexpr size_t kAlign = 256;
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

/// Returns the bytes of the float32 of a run, if its values have another dtype.
size_t float32_bytes(size_t numel, DType dtype) {
  return dtype == DType::float32 ? 0 : aligned(numel * sizeof(float));
}

/// Returns the bytes of a GPU's scratch memory for a run.
size_t scratch_bytes(const Piece& piece, size_t numel, DType dtype) {
  const size_t residual = std::max(feedback::scratch_bytes(*piece.codec, piece.worker, numel),
                                   feedback::scratch_bytes(*piece.codec, piece.owner, numel));
  return float32_bytes(numel, dtype) + aligned(residual + piece.codec->scratch_bytes(numel));
}

/// Returns the size that a payload of a variable codec states.
size_t used_bytes(const uint8_t* payload) {
  uint32_t bytes;
  std::memcpy(&bytes, payload, sizeof bytes);
  return bytes;
}

void advance(Received& payload, size_t bytes) {
  payload.left = payload.left.sub(bytes, payload.left.size - bytes);
}

/// True if payloads begin at equal distances, and each has at least `bytes`.
bool are_even(const std::vector<Received>& payloads, size_t bytes) {
  const uint8_t* const first = payloads[0].left.data;
  const ptrdiff_t stride = payloads.size() > 1 ? payloads[1].left.data - first : 0;
  for (size_t r = 0; r < payloads.size(); r++) {
    const Span<const uint8_t>& left = payloads[r].left;
    if (left.data != first + static_cast<ptrdiff_t>(r) * stride || left.size < bytes) return false;
  }
  return true;
}

/// Returns what a kernel needs to sum the contributions of all ranks to a run of `bytes`, and
/// advances to what follows them.
Contributions take(std::vector<Received>& payloads, size_t bytes, float divisor) {
  Contributions sum;
  sum.payloads = payloads[0].left.data;
  sum.stride = payloads.size() > 1 ? payloads[1].left.data - payloads[0].left.data : 0;
  sum.ranks = static_cast<uint32_t>(payloads.size());
  sum.divisor = divisor;
  for (Received& payload : payloads) advance(payload, bytes);
  return sum;
}

/// Adds its lifetime to the coding time, if the caller wants to know it.
class Timed {
 public:
  explicit Timed(OpTiming* timing) : timing_(timing), since_(timing ? ticks() : 0) {}
  ~Timed() {
    if (timing_) timing_->coded += ticks() - since_;
  }
  Timed(const Timed&) = delete;

 private:
  OpTiming* timing_;
  uint64_t since_;
};

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

Coder::Coder(const CodedArgs& args, void* out, feedback::Scratch& scratch,
             const CoderOptions& options)
    : args_(args),
      out_(out),
      scratch_(scratch),
      options_(options),
      divisor_(args.average ? static_cast<float>(options.divisor) : 1.0f),
      row_bytes_(row_numel(args.pieces) * size_of(args.data.dtype)),
      found_inf_at_(on_gpu() || options.found_inf ? options.found_inf : &found_inf_) {}

size_t Coder::scratch_bytes(const CodedArgs& args, const Plan& plan) {
  size_t largest = 0, all = 0;
  for (const BucketLayout* layout : {&plan.owned, &plan.shown}) {
    for (const Segment& segment : layout->segments()) {
      for (const PieceRun& run : layout->runs(segment)) {
        const size_t one = coded::scratch_bytes(args.pieces[run.piece], run.numel, args.data.dtype);
        largest = std::max(largest, one);
        all += one;
      }
    }
  }
  return std::max(largest, std::min(all, kScratchBytes));
}

void Coder::start() {
  if (batching_) batching_->start(options_.stream);
  batching_.reset();
  scratch_used_ = 0;
}

template <typename F>
void Coder::in_parts(Span<const PieceRun> runs, const F& do_part) {
  if (!on_gpu()) {
    for (size_t begin = 0, end = 0; begin < runs.size; begin = end) {
      size_t numel = 0;
      do {
        numel += runs[end++].numel;
      } while (end < runs.size && numel + runs[end].numel <= kTogether);
      do_part(Part{runs.sub(begin, end - begin), options_.stream, nullptr});
    }
    return;
  }
  const Span<uint8_t> scratch = options_.stream.scratch;
  for (size_t i = 0; i < runs.size; i++) {
    const size_t numel = runs[i].numel, floats = float32_bytes(numel, args_.data.dtype);
    const size_t bytes = coded::scratch_bytes(args_.pieces[runs[i].piece], numel, args_.data.dtype);
    if (bytes > scratch.size) {
      throw Error("a run of " + std::to_string(numel) + " values needs " + std::to_string(bytes) +
                  " bytes of scratch memory, but the stream has " + std::to_string(scratch.size) +
                  "; ask scratch_bytes()");
    }
    if (bytes > scratch.size - scratch_used_) start();
    if (!batching_) batching_.emplace(options_.swapped);
    uint8_t* const own = scratch.data + scratch_used_;
    scratch_used_ += bytes;
    Part part{runs.sub(i, 1), options_.stream, nullptr};
    part.stream.scratch = {own + floats, bytes - floats};
    if (floats > 0) part.floats = reinterpret_cast<float*>(own);
    batching_->row();
    do_part(part);
  }
}

template <typename F>
void Coder::for_runs(const Part& part, const Floats& values, const F& do_run) const {
  float* packed = values.data;
  for (const PieceRun& run : part.runs) {
    const Piece& piece = args_.pieces[run.piece];
    do_run(piece, run, values.packed ? packed : values.data + piece.offset + run.offset);
    packed += run.numel;
  }
}

RandomKey Coder::key(Hop hop, const Piece& piece, size_t row) const {
  RandomKey key;
  key.step = args_.step;
  key.tensor = piece.tensor;
  key.seed = hop_seed(args_.seed, hop == Hop::worker ? options_.rank : kOwnerHop);
  if (row > 0) key.seed = hop_seed(key.seed, static_cast<int>(row));
  return key;
}

Coder::Floats Coder::room(const Part& part, uint8_t* row) const {
  if (args_.data.dtype == DType::float32) return {reinterpret_cast<float*>(row), false};
  if (part.floats) return {part.floats, true};
  return {scratch_.get(feedback::Scratch::kFloat32, numel_of(part.runs)), true};
}

size_t Coder::encode(Hop hop, const Part& part, const Floats& values, uint8_t* out, size_t row,
                     const Contributions& sum) const {
  const Timed timed(options_.timing);
  uint8_t* const begin = out;
  for_runs(part, values, [&](const Piece& piece, const PieceRun& run, float* floats) {
    EncodeArgs args;
    args.in = {floats, run.numel};
    args.out = {out, piece.codec->encoded_bytes(run.numel)};
    args.key = key(hop, piece, row);
    args.index = run.offset;
    args.stream = part.stream;
    args.sum = sum;
    const feedback::Feedback& feedback = hop == Hop::worker ? piece.worker : piece.owner;
    feedback::encode(*piece.codec, feedback.at(row, piece.numel, run.offset, run.numel), args,
                     scratch_);
    out += is_close(*piece.codec) ? used_bytes(out) : args.out.size;
  });
  return static_cast<size_t>(out - begin);
}

void Coder::decode(const Part& part, Received& payload, const Floats& values, bool add) const {
  const Timed timed(options_.timing);
  for_runs(part, values, [&](const Piece& piece, const PieceRun& run, float* floats) {
    const Codec& codec = *piece.codec;
    const Span<const uint8_t> in = payload.left;
    const size_t most = codec.encoded_bytes(run.numel);
    size_t bytes = most;
    if (is_close(codec)) bytes = in.size < sizeof(uint32_t) ? 0 : used_bytes(in.data);
    if (bytes > in.size || bytes > most || bytes % 4 != 0 || (bytes == 0 && most > 0)) {
      throw WireMismatch("rank " + std::to_string(payload.sender) + " sent a payload of " +
                         codec.spec() + " for " + std::to_string(run.numel) +
                         " values whose header says that it has " + std::to_string(bytes) +
                         " bytes, but at most " + std::to_string(std::min(most, in.size)) +
                         " in a multiple of 4 are possible; install the same pycomm on all hosts");
    }
    // There is memory for the rest after the used bytes: payloads only move together.
    codec.decode({in.data, most}, {floats, run.numel}, part.stream, add);
    advance(payload, bytes);
  });
}

void Coder::add_payloads(const Part& part, std::vector<Received>& payloads,
                         const Floats& sum) const {
  for (size_t r = 0; r < payloads.size(); r++) decode(part, payloads[r], sum, r > 0);
}

void Coder::average(const Part& part, const Floats& sum) const {
  if (divisor_ == 1.0f) return;
  for_runs(part, sum, [&](const Piece&, const PieceRun& run, float* floats) {
    ConvertArgs divide;
    divide.in = divide.out = floats;
    divide.numel = run.numel;
    divide.divisor = divisor_;
    divide.stream = part.stream;
    convert(divide);
  });
}

void Coder::finish(const Part& part, const Floats& values, uint8_t* row, float divisor) {
  for_runs(part, values, [&](const Piece& piece, const PieceRun& run, float* floats) {
    ConvertArgs end;
    end.in = floats;
    end.numel = run.numel;
    end.divisor = divisor;
    end.stream = part.stream;
    end.out = place(row, piece, run);
    end.to = args_.data.dtype;
    end.found_inf = found_inf_at_;
    const bool nothing = end.in == end.out && end.divisor == 1.0f && !found_inf_at_;
    if (!nothing) convert(end);
  });
}

size_t Coder::contribute(Span<const PieceRun> runs, size_t row, size_t number, uint8_t* out) {
  uint8_t* const begin = out;
  uint8_t* const values = row_at(args_.data.data, row);
  in_parts(runs, [&](const Part& part) {
    const Floats floats = room(part, values);
    if (floats.packed) {
      for_runs(part, floats, [&](const Piece& piece, const PieceRun& run, float* to) {
        ConvertArgs widen;
        widen.in = place(values, piece, run);
        widen.from = args_.data.dtype;
        widen.out = to;
        widen.numel = run.numel;
        widen.stream = part.stream;
        convert(widen);
      });
    }
    out += encode(Hop::worker, part, floats, out, number);
  });
  return static_cast<size_t>(out - begin);
}

size_t Coder::own(Span<const PieceRun> runs, std::vector<Received>& payloads, uint8_t* out) {
  uint8_t* const begin = out;
  in_parts(runs, [&](const Part& part) {
    const Floats sum = room(part, row_at(out_, 0));
    const Codec& codec = *args_.pieces[part.runs[0].piece].codec;
    const size_t most = codec.encoded_bytes(part.runs[0].numel);
    if (on_gpu() && codec.fuses_sum() && are_even(payloads, most)) {
      out += encode(Hop::owner, part, sum, out, 0, take(payloads, most, divisor_));
      return;
    }
    add_payloads(part, payloads, sum);
    average(part, sum);
    out += encode(Hop::owner, part, sum, out, 0);
  });
  return static_cast<size_t>(out - begin);
}

void Coder::add_up(Span<const PieceRun> runs, std::vector<Received>& payloads) {
  uint8_t* const row = row_at(out_, 0);
  in_parts(runs, [&](const Part& part) {
    const Floats sum = room(part, row);
    add_payloads(part, payloads, sum);
    finish(part, sum, row, divisor_);
  });
}

void Coder::land(Span<const PieceRun> runs, size_t row, Received payload) {
  uint8_t* const to = row_at(out_, row);
  in_parts(runs, [&](const Part& part) {
    const Floats values = room(part, to);
    decode(part, payload, values, false);
    finish(part, values, to, 1.0f);
  });
}

}  // namespace pycomm::coded
