#include "collectives/coded/float32_view.h"

namespace pycomm::coded {

Float32View::Float32View(const CodedArgs& args, const void* values, int divisor,
                         feedback::Scratch& scratch, float* found_inf, Stream stream, float* room)
    : args_(args),
      values_(static_cast<uint8_t*>(const_cast<void*>(values))),
      divisor_(args.average ? static_cast<float>(divisor) : 1.0f),
      scratch_(scratch),
      found_inf_(found_inf),
      stream_(stream),
      room_(room) {}

uint8_t* Float32View::place(const PieceRun& run) const {
  return values_ + (args_.pieces[run.piece].offset + run.offset) * size_of(args_.data.dtype);
}

float* Float32View::packed(Span<const PieceRun> runs) const {
  if (room_) return room_;
  size_t numel = 0;
  for (const PieceRun& run : runs) numel += run.numel;
  return scratch_.get(feedback::Scratch::kFloat32, numel);
}

Floats Float32View::room(Span<const PieceRun> runs) const {
  if (is_wide()) return {reinterpret_cast<float*>(values_), false};
  return {packed(runs), true};
}

Floats Float32View::read(Span<const PieceRun> runs) const {
  const Floats floats = room(runs);
  if (!floats.packed) return floats;
  float* to = floats.data;
  for (const PieceRun& run : runs) {
    ConvertArgs widen;
    widen.in = place(run);
    widen.from = args_.data.dtype;
    widen.out = to;
    widen.numel = run.numel;
    widen.stream = stream_;
    convert(widen);
    to += run.numel;
  }
  return floats;
}

void Float32View::average(Span<const PieceRun> runs, Floats sum) const {
  if (divisor_ == 1.0f) return;
  float* packed = sum.data;
  for (const PieceRun& run : runs) {
    ConvertArgs divide;
    divide.in = divide.out = sum.of(args_.pieces[run.piece], run, packed);
    divide.numel = run.numel;
    divide.divisor = divisor_;
    divide.stream = stream_;
    convert(divide);
  }
}

void Float32View::finish(Span<const PieceRun> runs, Floats values, float divisor) const {
  float* packed = values.data;
  for (const PieceRun& run : runs) {
    ConvertArgs end;
    end.in = values.of(args_.pieces[run.piece], run, packed);
    end.numel = run.numel;
    end.divisor = divisor;
    end.stream = stream_;
    end.out = place(run);
    end.to = args_.data.dtype;
    end.found_inf = found_inf_;
    const bool nothing = end.in == end.out && end.divisor == 1.0f && !found_inf_;
    if (!nothing) convert(end);
  }
}

}  // namespace pycomm::coded
