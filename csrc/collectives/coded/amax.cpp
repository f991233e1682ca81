#include "collectives/coded/amax.h"

#include <algorithm>

#include "collectives/algorithms/dispatch.h"
#include "collectives/coded/coder.h"

namespace pycomm::coded {

Amax::Amax(const CodedArgs& args, const std::vector<PieceRun>& values, size_t row_numel,
           size_t rows)
    : args_(args), values_(values), row_numel_(row_numel), rows_(rows), first_(args.pieces.size) {
  for (const PieceRun& run : values) {
    const Codec& codec = *args.pieces[run.piece].codec;
    if (!codec.needs_amax()) continue;
    first_[run.piece] =
        static_cast<ptrdiff_t>(each_) - static_cast<ptrdiff_t>(granules(codec, run.offset));
    each_ += granules(codec, run.numel);
  }
}

void Amax::all_reduce(CollectiveContext& context) {
  if (count() == 0) return;
  numbers_.resize(count());
  place_ = numbers_.data();
  const uint64_t since = ticks();
  compute_amax({}, context.feedback_scratch());
  context.timing().coded += ticks() - since;
  dispatch::all_reduce(context, Algo::direct, numbers(), count(), {DType::float32, ReduceOp::max});
}

void Amax::compute_amax(Stream stream, feedback::Scratch& scratch, float* room) {
  for (size_t row = 0; row < rows_; row++) {
    for (const PieceRun& run : values_) compute_amax(run, row, stream, scratch, room);
  }
}

void Amax::compute_amax(const PieceRun& run, size_t row, Stream stream, feedback::Scratch& scratch,
                        float* room) {
  const Piece& piece = args_.pieces[run.piece];
  if (!piece.codec->needs_amax()) return;
  // Values are measured in steps, so that their copies stay small.
  const size_t granule = piece.codec->granule() * feedback::kBlock;
  const size_t step = granule ? granule * ((kSlice + granule - 1) / granule) : run.numel;
  for (size_t done = 0; done < run.numel; done += step) {
    const PieceRun part{run.piece, run.offset + done, std::min(step, run.numel - done)};
    ConvertArgs widen;
    widen.in = args_.data.at(row * row_numel_ + piece.offset + part.offset);
    auto* in = static_cast<const float*>(widen.in);
    if (args_.data.dtype != DType::float32) {
      float* const wide = room ? room : scratch.get(feedback::Scratch::kFloat32, part.numel);
      widen.from = args_.data.dtype;
      widen.out = wide;
      widen.numel = part.numel;
      widen.stream = stream;
      convert(widen);
      in = wide;
    }
    measure_piece(piece, Hop::worker, {row, part.offset}, {in, part.numel},
                  const_cast<float*>(of(part, row)), stream, scratch);
  }
}

const float* Amax::of(const PieceRun& run, size_t row) const {
  const Codec& codec = *args_.pieces[run.piece].codec;
  if (!codec.needs_amax()) return nullptr;
  return place_ + row * each_ +
         (first_[run.piece] + static_cast<ptrdiff_t>(granules(codec, run.offset)));
}

}  // namespace pycomm::coded
