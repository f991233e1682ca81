// Feedback: stored values are widened to float32, encoded once, and stored again. On a GPU the
// codec's own kernel does that, or kernels before and after it (codecs/feedback.cu), in scratch
// memory of the stream.
#include "codecs/base/feedback.h"

#include <cstring>

#include "codecs/base/launch.h"
#include "codecs/base/loops.h"
#include "codecs/base/stored.h"
#include "core/error.h"

namespace pycomm::feedback {
namespace {

// ------------------------------------------------------------------------- stored forms

PYCOMM_SIMD void load_bfloat16(const uint16_t* __restrict in, size_t n, float* __restrict out) {
  for (size_t i = 0; i < n; i++) out[i] = BFloat16::decode(in[i]);
}

PYCOMM_SIMD void store_bfloat16(const float* __restrict in, size_t n, uint16_t* __restrict out) {
  for (size_t i = 0; i < n; i++) out[i] = static_cast<uint16_t>(BFloat16::encode_saturating(in[i]));
}

// Not as many values as are left in one loop, which would take its iterations one by one.

PYCOMM_SIMD void load_int8(const uint8_t* __restrict in, size_t n, float* __restrict out) {
  for (; n >= kBlock; n -= kBlock, in += kBlockBytes, out += kBlock) codecs::load_block(in, out);
  if (n == 0) return;
  float last[kBlock];
  codecs::load_block(in, last);
  std::memcpy(out, last, n * sizeof(float));
}

PYCOMM_SIMD void store_int8(const float* __restrict in, size_t n, uint8_t* __restrict out) {
  for (; n >= kBlock; n -= kBlock, in += kBlock, out += kBlockBytes) codecs::store_block(in, out);
  if (n == 0) return;
  float last[kBlock] = {};
  std::memcpy(last, in, n * sizeof(float));
  codecs::store_block(last, out);
}

// -------------------------------------------------------------------------------- rules

PYCOMM_SIMD void advance(const float* __restrict x, float decay, size_t n, float* __restrict u) {
  for (size_t i = 0; i < n; i++) u[i] = decay * u[i] + x[i];
}

/// Applies momentum factor masking: what has been sent must not push again.
PYCOMM_SIMD void mask(const float* x, const float* v, const float* new_residual, size_t n,
                      float* u) {
  for (size_t i = 0; i < n; i++) u[i] = new_residual[i] == x[i] + v[i] ? u[i] : 0.0f;
}

PYCOMM_SIMD void shrink(float decay, size_t n, float* x) {
  for (size_t i = 0; i < n; i++) x[i] = decay * x[i];
}

enum Place : size_t { kResidual, kMomentum, kNewResidual };

float* loaded(const Feedback& feedback, const Memory& memory, size_t n, float* to) {
  load(feedback.storage, memory.old, {to, n});
  return to;
}

/// Input of the codec: p = x + residual.
struct Past {
  Past(const Feedback& feedback, Span<const float> in, Scratch& scratch) : x(in.data) {
    const size_t n = in.size;
    if (feedback.error) {
      residual = loaded(feedback, feedback.error, n, scratch.get(kResidual, n));
      if (feedback.kind == Kind::decay) shrink(feedback.decay, n, residual);
    }
    if (feedback.kind != Kind::momentum) return;
    u = loaded(feedback, feedback.momentum, n, scratch.get(kMomentum, n));
    advance(in.data, feedback.decay, n, u);
    x = u;
  }

  const float* x;
  float* residual = nullptr;
  float* u = nullptr;
};

/// True if the codec reads and writes the memory itself.
bool is_plain(const Feedback& feedback) {
  return feedback.kind == Kind::residual && feedback.storage == Storage::float32;
}

// -------------------------------------------------------------------------------- a GPU

using codecs::stored::LoadParams;
using codecs::stored::StoreParams;

template <typename Params>
void launch(const char* kernel, Storage storage, const Params& params, Stream stream) {
  constexpr const char* kForms[] = {"stored::Float32", "stored::BFloat16", "stored::Int8"};
  const std::string form = kForms[static_cast<int>(storage)];
  codecs::launch("feedback", codecs::kernel_name(kernel, form), params, params.numel,
                 codecs::stored::kRows * cuda::kRow, stream);
}

static_assert(static_cast<uint32_t>(Storage::float32) == codecs::stored::kFloat32 &&
              static_cast<uint32_t>(Storage::bfloat16) == codecs::stored::kBFloat16 &&
              static_cast<uint32_t>(Storage::int8) == codecs::stored::kInt8);

/// The memory of errors, for codecs that load and store it.
StoredResidual stored_residual(const Feedback& feedback) {
  return {feedback.error.old, feedback.error.fresh, static_cast<uint32_t>(feedback.storage),
          feedback.kind == Kind::decay ? feedback.decay : 1.0f};
}

void encode_cuda(const Codec& codec, const Feedback& feedback, EncodeArgs args) {
  const bool decays = feedback.kind == Kind::decay;
  if (codec.fuses_residual()) {
    args.stored = stored_residual(feedback);
    return codec.encode(args);
  }
  const size_t bytes = scratch_bytes(codec, feedback, args.in.size);
  Stream& stream = args.stream;
  auto* const residual = reinterpret_cast<float*>(stream.scratch.data);
  stream.scratch = stream.scratch.sub(bytes, stream.scratch.size - bytes);
  launch("stored::load_kernel", feedback.storage,
         LoadParams{{},
                    feedback.error.old,
                    feedback.error.fresh,
                    residual,
                    args.in.size,
                    feedback.decay,
                    decays},
         stream);
  args.residual = args.new_residual = residual;
  codec.encode(args);
  auto* const old = const_cast<uint8_t*>(feedback.error.old);
  launch("stored::store_kernel", feedback.storage,
         StoreParams{{}, residual, feedback.error.fresh, old, args.in.size}, stream);
}

}  // namespace

bool has_kernels(Kind kind) { return kind != Kind::momentum; }

size_t scratch_bytes(const Codec& codec, const Feedback& feedback, size_t numel) {
  constexpr size_t kAlign = 256;
  if (!feedback || is_plain(feedback) || codec.fuses_residual()) return 0;
  return (numel * sizeof(float) + kAlign - 1) / kAlign * kAlign;
}

size_t stored_bytes(Storage storage, size_t numel) {
  switch (storage) {
    case Storage::float32:
      return numel * sizeof(float);
    case Storage::bfloat16:
      return numel * sizeof(uint16_t);
    case Storage::int8:
      return (numel + kBlock - 1) / kBlock * kBlockBytes;
  }
  throw Error("feedback: unknown storage");
}

void load(Storage storage, const uint8_t* stored, Span<float> out) {
  switch (storage) {
    case Storage::float32:
      std::memcpy(out.data, stored, out.size * sizeof(float));
      return;
    case Storage::bfloat16:
      load_bfloat16(reinterpret_cast<const uint16_t*>(stored), out.size, out.data);
      return;
    case Storage::int8:
      load_int8(stored, out.size, out.data);
  }
}

void store(Storage storage, Span<const float> in, uint8_t* stored) {
  switch (storage) {
    case Storage::float32:
      std::memcpy(stored, in.data, in.size * sizeof(float));
      return;
    case Storage::bfloat16:
      store_bfloat16(in.data, in.size, reinterpret_cast<uint16_t*>(stored));
      return;
    case Storage::int8:
      store_int8(in.data, in.size, stored);
  }
}

std::pair<size_t, size_t> shared_span(const Spans& spans, size_t old, size_t fresh) {
  if (spans[old] != spans[fresh]) {
    throw Error("a residual is read for other values than it is written for");
  }
  return spans[old];
}

Feedback Feedback::at(size_t row, size_t numel, size_t offset, size_t count) const {
  Feedback moved = *this;
  for (Memory* memory : {&moved.error, &moved.momentum}) {
    if (!*memory) continue;
    if (offset < memory->begin || count > memory->end || offset > memory->end - count) {
      throw Error("a residual has no memory for " + std::to_string(count) + " values from " +
                  std::to_string(offset) + " on");
    }
    *memory = memory->at(row * stored_bytes(storage, numel) + stored_bytes(storage, offset) -
                         stored_bytes(storage, memory->begin));
  }
  return moved;
}

float* Scratch::get(size_t place, size_t numel) {
  Place& room = places_[place];
  if (room.numel < numel) {
    room.floats.reset(new float[numel]);
    room.numel = numel;
  }
  return room.floats.get();
}

void encode(const Codec& codec, const Feedback& feedback, EncodeArgs args, Scratch& scratch) {
  if (!feedback) return codec.encode(args);
  if (is_plain(feedback)) {
    args.residual = reinterpret_cast<const float*>(feedback.error.old);
    args.new_residual = reinterpret_cast<float*>(feedback.error.fresh);
    return codec.encode(args);
  }
  if (args.stream.device == Device::cuda) {
    if (!has_kernels(feedback.kind))
      throw Error("feedback: momentum has no kernels on a GPU; exchange payloads instead");
    return encode_cuda(codec, feedback, args);
  }
  if (feedback.kind != Kind::momentum && codec.loads_residual()) {
    args.stored = stored_residual(feedback);
    return codec.encode(args);
  }
  const size_t n = args.in.size;
  const Past past(feedback, args.in, scratch);
  float* const new_residual = scratch.get(kNewResidual, n);
  args.in.data = past.x;
  if (feedback.error) {
    args.residual = past.residual;
    args.new_residual = new_residual;
  }
  codec.encode(args);

  if (feedback.kind == Kind::momentum) {
    if (feedback.error) mask(past.x, past.residual, new_residual, n, past.u);
    store(feedback.storage, {past.u, n}, feedback.momentum.fresh);
  }
  if (feedback.error) store(feedback.storage, {new_residual, n}, feedback.error.fresh);
}

}  // namespace pycomm::feedback
