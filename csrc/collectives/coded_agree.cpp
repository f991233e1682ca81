#include "collectives/coded_agree.h"

#include "collectives/coded_coder.h"
#include "collectives/dispatch.h"

namespace pycomm::coded {

Agreed::Agreed(const CodedArgs& args, const std::vector<Run>& values, size_t row_numel, size_t rows)
    : args_(args), values_(values), row_numel_(row_numel), rows_(rows), first_(args.pieces.size) {
  for (const Run& run : values) {
    const Codec& codec = *args.pieces[run.piece].codec;
    if (!codec.agrees()) continue;
    first_[run.piece] =
        static_cast<ptrdiff_t>(each_) - static_cast<ptrdiff_t>(granules(codec, run.offset));
    each_ += granules(codec, run.numel);
  }
  numbers_.resize(each_ * rows);
}

void Agreed::agree(Exchange& ex) {
  if (numbers_.empty()) return;
  feedback::Scratch scratch;
  for (size_t row = 0; row < rows_; row++) {
    for (const Run& run : values_) {
      const Piece& piece = args_.pieces[run.piece];
      if (!piece.codec->agrees()) continue;
      const Span<const float> in(args_.data.data + row * row_numel_ + piece.offset + run.offset,
                                 run.numel);
      measure_piece(piece, Hop::worker, {row, run.offset}, in, const_cast<float*>(of(run, row)),
                    scratch);
    }
  }
  dispatch::all_reduce(ex, Algo::direct, numbers_.data(), numbers_.size(),
                       {DType::float32, ReduceOp::max});
}

const float* Agreed::of(const Run& run, size_t row) const {
  const Codec& codec = *args_.pieces[run.piece].codec;
  if (!codec.agrees()) return nullptr;
  return numbers_.data() + row * each_ +
         (first_[run.piece] + static_cast<ptrdiff_t>(granules(codec, run.offset)));
}

}  // namespace pycomm::coded
