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

/// The memory of errors.
Residual residual_of(const Feedback& feedback) {
  return {feedback.error.old, feedback.error.fresh, static_cast<uint32_t>(feedback.storage),
          feedback.kind == Kind::decay ? feedback.decay : 1.0f};
}

Residual residual_of(const float* old, float* fresh) {
  return {reinterpret_cast<const uint8_t*>(old), reinterpret_cast<uint8_t*>(fresh)};
}

// -------------------------------------------------------------------------------- a GPU

static_assert(static_cast<uint32_t>(Storage::float32) == codecs::stored::kFloat32 &&
              static_cast<uint32_t>(Storage::int8) == codecs::stored::kInt8);

template <typename Params>
void launch(const char* kernel, Storage storage, const Params& params, Stream stream) {
  constexpr const char* kForms[] = {"stored::Float32", "stored::Int8"};
  const std::string form = kForms[static_cast<int>(storage)];
  codecs::launch("feedback", codecs::kernel_name(kernel, form), params, params.numel,
                 codecs::stored::kRows * cuda::kRow, stream);
}

// For a codec whose kernels do not take this stored form.
void encode_stored(const Codec& codec, const Feedback& feedback, EncodeArgs args) {
  const size_t bytes = scratch_bytes(codec, feedback, args.in.size);
  const uint8_t* const old = args.residual.old;
  uint8_t* const fresh = args.residual.fresh;
  const float decay = args.residual.decay;
  Stream& stream = args.stream;
  auto* const residual = reinterpret_cast<float*>(stream.scratch.data);
  stream.scratch = stream.scratch.sub(bytes, stream.scratch.size - bytes);
  launch("stored::load_kernel", feedback.storage,
         codecs::stored::LoadParams{{}, old, fresh, residual, args.in.size, decay}, stream);
  args.residual = residual_of(residual, residual);
  codec.encode(args);
  launch("stored::store_kernel", feedback.storage,
         codecs::stored::StoreParams{{}, residual, fresh, const_cast<uint8_t*>(old), args.in.size},
         stream);
}

}  // namespace

bool has_kernels(Kind kind) { return kind != Kind::momentum; }

size_t scratch_bytes(const Codec& codec, const Feedback& feedback, size_t numel) {
  constexpr size_t kAlign = 256;
  if (!feedback || residual_of(feedback).plain() || codec.takes_stored(Device::cuda)) return 0;
  return (numel * sizeof(float) + kAlign - 1) / kAlign * kAlign;
}

size_t stored_bytes(Storage storage, size_t numel) {
  switch (storage) {
    case Storage::float32:
      return numel * sizeof(float);
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
    case Storage::int8:
      load_int8(stored, out.size, out.data);
  }
}

void store(Storage storage, Span<const float> in, uint8_t* stored) {
  switch (storage) {
    case Storage::float32:
      std::memcpy(stored, in.data, in.size * sizeof(float));
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
  const bool momentum = feedback.kind == Kind::momentum;
  const bool on_gpu = args.stream.device == Device::cuda;
  args.residual = residual_of(feedback);
  if (!momentum && (args.residual.plain() || codec.takes_stored(args.stream.device))) {
    return codec.encode(args);
  }
  if (on_gpu) {
    if (!has_kernels(feedback.kind))
      throw Error("feedback: momentum has no kernels on a GPU; exchange payloads instead");
    return encode_stored(codec, feedback, args);
  }
  const size_t n = args.in.size;
  float *residual = nullptr, *fresh = nullptr, *u = nullptr;
  if (feedback.error) {
    residual = scratch.get(kResidual, n);
    fresh = scratch.get(kNewResidual, n);
    load(feedback.storage, feedback.error.old, {residual, n});
    if (feedback.kind == Kind::decay) shrink(feedback.decay, n, residual);
  }
  args.residual = residual_of(residual, fresh);
  if (momentum) {
    u = scratch.get(kMomentum, n);
    load(feedback.storage, feedback.momentum.old, {u, n});
    advance(args.in.data, feedback.decay, n, u);
    args.in.data = u;
  }
  codec.encode(args);
  if (momentum) {
    if (residual) mask(u, residual, fresh, n, u);
    store(feedback.storage, {u, n}, feedback.momentum.fresh);
  }
  if (residual) store(feedback.storage, {fresh, n}, feedback.error.fresh);
}

}  // namespace pycomm::feedback
