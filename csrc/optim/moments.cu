// The passes of moments.h on a GPU, for the matrices of a bucket or of a step in one launch, with
// the same bits. Compiled by nvcc and NVRTC.
//
// What warps have added up is put together by the last block of threads of a matrix, so that a sum
// takes no launch of its own, and no atomic addition, whose order varies.
#include "codecs/base/kernels_cuda.h"
#include "codecs/base/stored.h"
#include "codecs/base/warp_cuda.h"
#include "codecs/cast.h"
#include "optim/moments_passes.h"

namespace pycomm::moments {

// ---------------------------------------------------------------- a warp

static_assert(kLanes == cuda::kLanes && kLanes == codecs::stored::kBlock);

/// Returns value i of an array in one of the forms.
__device__ __forceinline__ float stored_value(const void* from, uint32_t form, size_t i) {
  if (form == codecs::stored::kFloat32) return static_cast<const float*>(from)[i];
  if (form == codecs::stored::kInt8) {
    const auto* block = static_cast<const uint8_t*>(from) +
                        i / codecs::stored::kBlock * codecs::stored::kBlockBytes;
    const float scale = *reinterpret_cast<const float*>(block);
    const auto code = static_cast<int8_t>(block[sizeof(float) + i % codecs::stored::kBlock]);
    return codecs::stored::value_of(code, scale);
  }
  const uint16_t code = static_cast<const uint16_t*>(from)[i];
  return form == kFloat16 ? codecs::cast::Float16::decode(code)
                          : codecs::cast::BFloat16::decode(code);
}

struct Warp {
  using Lanes = float;
  static constexpr bool kInMemory = false;
  static constexpr int kAhead = kEach;
  static constexpr size_t kNeighbours = kPatch;
  uint32_t lane = codecs::lane_of_warp();

  __device__ static bool has(int k, int) { return k < kEach; }
  __device__ bool takes(int left, int k) const {
    return k * kApart < left - static_cast<int>(lane);
  }
  __device__ bool leads() const { return lane == 0; }
  __device__ Place place(const Rows& rows, size_t i) const {
    return {static_cast<uint32_t>((i + lane) / rows.columns),
            static_cast<uint32_t>((i + lane) % rows.columns)};
  }
  __device__ static float by_row(const Place& place, const Rows& rows, const float* factors) {
    return factor_of(factors, rows, place.row);
  }
  __device__ static float by_column(const Place& place, const Rows&, const float* factors) {
    return factors[place.column];
  }

  __device__ float load(const float* from, size_t i, int left, int k) const {
    return takes(left, k) ? from[i + k * kApart + lane] : 0.0f;
  }
  template <typename Value>
  __device__ float load(const Array<Value>& from, size_t i, int left, int k) const {
    return takes(left, k) ? from.value(i + k * kApart + lane) : 0.0f;
  }
  __device__ float load(const void* from, uint32_t form, size_t i, int left, int k) const {
    return takes(left, k) ? stored_value(from, cuda::opaque(form), i + k * kApart + lane) : 0.0f;
  }
  __device__ void store(float* to, size_t i, int left, int k, float x) const {
    if (takes(left, k)) to[i + k * kApart + lane] = x;
  }
  template <typename Value>
  __device__ void store(const Array<Value>& to, size_t i, int left, int k, float x) const {
    if (takes(left, k)) to.at[i + k * kApart + lane] = Value::encode(x);
  }
  template <typename Value>
  __device__ void put(const Array<Value>& to, size_t i, int left, int k, float x) const {
    store(to, i, left, k, x);
  }
  /// Called by all lanes; i is a multiple of kLanes.
  __device__ void store(uint8_t* to, uint32_t form, size_t i, int left, int k, float x) const {
    namespace stored = codecs::stored;
    form = cuda::opaque(form);  // else each form would have a loop of its own
    if (form == stored::kInt8) {
      const float amax =
          bits_float(codecs::max_of_warp(takes(left, k) ? codecs::magnitude_bits(x) : 0));
      if (k * kApart >= left) return;
      uint8_t* const block = to + (i / stored::kBlock + k) * stored::kBlockBytes;
      const float inv = codecs::inv_scale(amax, stored::kTop);
      // A block is stored whole, with zeros behind the last value.
      const bool coded = takes(left, k) && codecs::used(amax);
      if (lane == 0) *reinterpret_cast<float*>(block) = stored::scale_of(amax);
      block[sizeof(float) + lane] =
          static_cast<uint8_t>(coded ? stored::code_of(x, inv) : int8_t{0});
    } else {
      store(reinterpret_cast<float*>(to), i, left, k, x);
    }
  }

  __device__ static float clamped(float x, float limit) {
    x = x > limit ? limit : x;
    return x < -limit ? -limit : x;
  }
  __device__ void look(Probe& probe, size_t i, int left, int k, float x) const {
    if (takes(left, k)) look_at(probe, static_cast<uint32_t>(i + k * kApart + lane), x);
  }
  __device__ __forceinline__ static float sum(float x) {
#pragma unroll
    for (int step = cuda::kLanes / 2; step > 0; step /= 2) {
      x = x + bits_float(__shfl_xor_sync(~0u, float_bits(x), step));
    }
    return x;
  }
};

// ---------------------------------------------------------------- a team

/// The threads of a block, which call each of these together.
struct Block {
  template <typename Act>
  __device__ void each(size_t count, const Act& act) const {
    for (size_t i = threadIdx.x; i < count; i += cuda::kThreads) act(i);
  }
  template <typename At>
  __device__ float total(size_t count, const At& at) const {
    __shared__ float of_patch[cuda::kWarps];
    float sum = 0.0f;
    for (size_t begin = 0; begin < count; begin += cuda::kWarps * kPatch) {
      const size_t patch = begin + codecs::warp_of_block() * kPatch;
      float lane = 0.0f;
      for (int k = 0; k < kEach; k++) {
        const size_t j = patch + codecs::lane_of_warp() + k * kLanes;
        lane = lane + (j < count ? at(j) : 0.0f);
      }
      lane = Warp::sum(lane);
      if (codecs::lane_of_warp() == 0) of_patch[codecs::warp_of_block()] = lane;
      __syncthreads();
      for (int w = 0; w < cuda::kWarps; w++) {
        if (begin + w * kPatch < count) sum = sum + of_patch[w];
      }
      __syncthreads();
    }
    return sum;
  }
  template <typename At>
  __device__ bool all(size_t count, const At& at) const {
    int wrong = 0;
    for (size_t i = threadIdx.x; i < count; i += cuda::kThreads) wrong |= !at(i);
    return __syncthreads_or(wrong) == 0;
  }
  template <typename Act>
  __device__ Folding once(const Act& act) const {
    __shared__ Folding found;
    if (leads()) found = act();
    __syncthreads();
    return found;
  }
  __device__ bool leads() const { return threadIdx.x == 0; }
  /// Reads what other blocks of this launch have written, past the cache of this processor.
  __device__ float fresh(const float* from) const { return __ldcg(from); }
  __device__ void prepare(float*, size_t, size_t) const {}
  __device__ float down(const float* from, size_t rows, size_t columns) const {
    float sum = fresh(from);
#pragma unroll 8
    for (size_t b = 1; b < rows; b++) sum = sum + fresh(from + b * columns);
    return sum;
  }
  __device__ void sync() const { __syncthreads(); }
};

/// Tells all threads of a block whether it is the last one of its matrix that comes here. That one
/// sees what the others have written, if it reads by fresh().
template <typename Params>
__device__ __forceinline__ bool is_last(const Params& args, int pass) {
  __shared__ uint32_t before;
  uint32_t* const done = &room_of(args).numbers->done[pass];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd(done, 1);
  __syncthreads();
  const bool last = before == args.rows.shards * args.blocks.count - 1;
  if (last && threadIdx.x == 0) *done = 0;
  if (last) __threadfence();
  __syncthreads();
  return last;
}

// ---------------------------------------------------------------- kernels

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads) squares(const codecs::Batch<CodingParams> batch) {
  const CodingParams args = codecs::place_of_block(batch);
  const auto patches = static_cast<uint32_t>(args.rows.patches());
  const size_t tile = codecs::warp_of(args), first = tile / patches * kBlock;
  if (first < args.rows.real()) {
    square_tile(Warp(), args, Array<Value>(args.values), first,
                first + kBlock < args.rows.real() ? first + kBlock : args.rows.real(),
                static_cast<uint32_t>(tile % patches));
  }
  if (is_last(args, 0)) finish_squares(Block(), args);
}

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads) encode(const codecs::Batch<CodingParams> batch) {
  const CodingParams args = codecs::tensor_of_block(batch);
  const Rows& rows = args.rows;
  const Room room = room_of(args);
  const auto patches = static_cast<uint32_t>(rows.patches());
  const size_t tile = codecs::warp_of(args), first = tile / patches * kEncodeRows;
  if (first < rows.count) {
    const Warp warp;
    const auto patch = static_cast<uint32_t>(tile % patches);
    const size_t begin = size_t{patch} * kPatch;
    const float share = room.shares[rows.shard];
    float factors[kEach];
#pragma unroll
    for (int k = 0; k < kEach; k++) {
      const int left = left_of(rows.columns, begin);
      factors[k] = args.divides != 0 ? warp.load(room.inverse_column, begin, left, k) : 1.0f;
    }
    const size_t end = first + kEncodeRows < rows.count ? first + kEncodeRows : rows.count;
    for (size_t i = first; i < end; i++) {
      encode_patch<false>(warp, args, Array<Value>(args.values), Array<Value>(args.copy), i, patch,
                          share, factors);
    }
  }
  if (args.stored != nullptr && is_last(args, 1)) finish_encode(Block(), args);
}

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads) sent(const codecs::Batch<SentParams> batch) {
  const SentParams args = codecs::tensor_of_block(batch);
  send_patch(Warp(), args, Array<Value>(args.values), codecs::warp_of(args));
}

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads) land(const codecs::Batch<LandParams> batch) {
  const LandParams args = codecs::place_of_block(batch);
  const Array<Value> values(args.values);
  land_patch(Warp(), args, values, codecs::warp_of(args));
  if (codecs::block_of(args) != 0) return;
  static_assert(kProbed == cuda::kThreads * kEach);
  __shared__ Probe probes[cuda::kThreads];
  Probe probe{};
  look_at_patch(Warp(), args, values, codecs::warp_of_block(), probe);
  probes[threadIdx.x] = probe;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int thread = 1; thread < cuda::kThreads; thread++) {
    const Probe& other = probes[thread];
    look_at(probe, other.at[0], other.value[0]);
    look_at(probe, other.at[1], other.value[1]);
  }
  room_of(args).numbers->probe = probed(probe, args.unit);
}

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads) move(const codecs::Batch<MoveParams> batch) {
  const MoveParams& args = codecs::place_of_block(batch);
  move_patch(Warp(), args, Array<Value>(args.values), Array<Value>(args.gradient),
             Array<Value>(args.momentum), codecs::warp_of(args));
}

__global__ void __launch_bounds__(cuda::kThreads) adamw(const codecs::Batch<AdamWParams> batch) {
  const AdamWParams args = codecs::place_of_block(batch);
  const size_t begin = size_t{codecs::block_of(args)} * cuda::kThreads * kEach + threadIdx.x;
#pragma unroll
  for (size_t k = 0; k < kEach; k++) {
    const size_t i = begin + k * cuda::kThreads;
    if (i >= args.numel) return;
    step_value(args.values[i], args.gradient[i], args.momentum[i], args.squares[i], args.by);
  }
}

// A matrix is that of a block of threads.

__global__ void __launch_bounds__(cuda::kThreads)
    collect(const codecs::Batch<CollectParams> batch) {
  const CollectParams args = codecs::place_of_block(batch);
  write_means(Block(), args);
}

__global__ void __launch_bounds__(cuda::kThreads) commit(const codecs::Batch<CommitParams> batch) {
  const CommitParams args = codecs::place_of_block(batch);
  take_commit(Block(), args);
}

}  // namespace pycomm::moments

namespace pycomm::codecs {

#define OF_VALUES(kernel)                                    \
  PYCOMM_KERNEL(pycomm::moments::kernel<cast::Float32>),     \
      PYCOMM_KERNEL(pycomm::moments::kernel<cast::Float16>), \
      PYCOMM_KERNEL(pycomm::moments::kernel<cast::BFloat16>)
PYCOMM_KERNELS(moments, OF_VALUES(squares), OF_VALUES(encode), OF_VALUES(sent), OF_VALUES(land),
               OF_VALUES(move), PYCOMM_KERNEL(pycomm::moments::collect),
               PYCOMM_KERNEL(pycomm::moments::commit), PYCOMM_KERNEL(pycomm::moments::adamw));
#undef OF_VALUES

}  // namespace pycomm::codecs
