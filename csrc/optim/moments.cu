// The passes of moments.h on a GPU, for the matrices of a bucket or of a step in one launch, with
// the same bits. Compiled by nvcc and NVRTC.
//
// A warp takes a patch of columns in some rows, or 256 neighbouring values; a lane every 32nd
// value, as in the order of sums. What blocks of threads have added up is put together by the last
// one of a matrix, so that a sum takes no launch of its own, and no atomic addition, whose order
// varies.
#include "codecs/base/kernels_cuda.h"
#include "codecs/base/stored.h"
#include "codecs/base/warp_cuda.h"
#include "codecs/cast.h"
#include "optim/moments_params.h"
#include "optim/moments_sums.h"

namespace pycomm::moments {

// ---------------------------------------------------------------- values

/// Lanes of a patch: a lane has every kLanes-th value.
constexpr int kEach = kPatch / kLanes;
static_assert(kLanes == cuda::kLanes);

__device__ __forceinline__ uint32_t patches_of(const Rows& rows) {
  return static_cast<uint32_t>(rows.patches());
}

/// Returns the room of a matrix. It always has one: asking keeps its addresses, which come late in
/// most kernels, out of registers that are scarce before.
template <typename Params>
__device__ __forceinline__ Room room_of(const Params& args) {
  return args.room == nullptr ? Room{} : room_at(args.room, args.rows.all, args.rows.columns);
}

/// Returns the factor of a row of a shard; that of padding changes nothing.
__device__ __forceinline__ float factor_of(const float* by_row, const Rows& rows, size_t i) {
  return i < rows.real() ? by_row[rows.first + i] : 1.0f;
}

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
                          : codecs::stored::BFloat16::decode(code);
}

// ---------------------------------------------------------------- sums

/// Returns the sum of the lanes: half of them is added to the other, until one is left.
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int step = cuda::kLanes / 2; step > 0; step /= 2) {
    x = x + bits_float(__shfl_xor_sync(~0u, float_bits(x), step));
  }
  return x;
}

/// Returns the sum of at(j) for j < count, to all threads of a block, which call it together.
template <typename At>
__device__ float total(size_t count, const At& at) {
  __shared__ float of_patch[cuda::kWarps];
  float sum = 0.0f;
  for (size_t begin = 0; begin < count; begin += cuda::kWarps * kPatch) {
    const size_t patch = begin + codecs::warp_of_block() * kPatch;
    float lane = 0.0f;
    for (int k = 0; k < kEach; k++) {
      const size_t j = patch + codecs::lane_of_warp() + k * kLanes;
      lane = lane + (j < count ? at(j) : 0.0f);
    }
    lane = sum_of_lanes(lane);
    if (codecs::lane_of_warp() == 0) of_patch[codecs::warp_of_block()] = lane;
    __syncthreads();
    for (int w = 0; w < cuda::kWarps; w++) {
      if (begin + w * kPatch < count) sum = sum + of_patch[w];
    }
    __syncthreads();
  }
  return sum;
}

/// Tells all threads of a block whether it is the last one of its matrix that comes here. That one
/// sees what the others have written, if it reads by fresh().
__device__ inline bool is_last(uint32_t* done, uint32_t blocks) {
  __shared__ uint32_t before;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd(done, 1);
  __syncthreads();
  const bool last = before == blocks - 1;
  if (last && threadIdx.x == 0) *done = 0;
  if (last) __threadfence();
  __syncthreads();
  return last;
}

/// Reads what other blocks of this launch have written, past the cache of this processor.
__device__ __forceinline__ float fresh(const float* from) { return __ldcg(from); }

/// Parts of the sums of a shard, in scratch memory.
struct Parts {
  float* row;         ///< [rows, patches]; then [rows]
  float* row_sum;     ///< [rows]
  float* column;      ///< [blocks, columns]
  float* projection;  ///< [kProjections, patches]; of all shards in the first one's

  /// `at`: the scratch memory of all shards.
  __device__ Parts(float* at, const Rows& rows) {
    row = at + rows.shard * rows.scratch_floats();
    row_sum = row + rows.cells();
    column = row_sum + rows.count;
    projection = at + rows.cells() + rows.count + rows.blocks() * rows.columns;
  }
};

/// Returns the sum of a row's parts.
__device__ __forceinline__ float sum_of_patches(const float* parts, size_t row, uint32_t patches) {
  float sum = 0.0f;
  for (uint32_t p = 0; p < patches; p++) sum = sum + fresh(parts + row * patches + p);
  return sum;
}

// ---------------------------------------------------------------- squares

/// Adds up what the blocks have found, and decides by how much the gradients of shards count.
__device__ inline void finish_squares(const SquaresParams& args, const Room& room) {
  const Rows first = args.rows.of_shard(0);
  const uint32_t patches = patches_of(first);
  const size_t begin = first.first, end = begin + size_t{first.shards} * first.count;
  float* const columns = room.fresh + first.all;
  float* const extra = columns + first.columns;
  const float unit_squared = args.unit_squared;
  for (size_t i = threadIdx.x; i < first.all; i += cuda::kThreads) {
    if (i < begin || i >= end) room.fresh[i] = 0.0f;  // of shards that are not coded here
  }
  for (uint32_t s = 0; s < first.shards; s++) {
    const Rows shard = first.of_shard(s);
    const Parts parts(args.scratch, shard);
    for (size_t i = threadIdx.x; i < shard.real(); i += cuda::kThreads) {
      const float sum = sum_of_patches(parts.row, i, patches);
      parts.row_sum[i] = sum;
      room.fresh[shard.first + i] = sum * unit_squared;
    }
  }
  for (size_t j = threadIdx.x; j < first.columns; j += cuda::kThreads) {
    float all = 0.0f;
    for (uint32_t s = 0; s < first.shards; s++) {
      const Rows shard = first.of_shard(s);
      const size_t blocks = (shard.real() + kBlock - 1) / kBlock;
      if (blocks == 0) break;
      const float* const column = Parts(args.scratch, shard).column + j;
      float sum = fresh(column);
#pragma unroll 8
      for (size_t b = 1; b < blocks; b++) sum = sum + fresh(column + b * first.columns);
      all = all + sum * unit_squared;
    }
    columns[j] = all;
  }
  const auto unit = static_cast<float>(args.unit);
  for (size_t k = threadIdx.x; k < kProjections; k += cuda::kThreads) {
    const size_t row = args.first + k * args.stride;
    const bool there = args.signs != nullptr && row >= begin && row < end && row < first.all;
    const float* const projection = Parts(args.scratch, first).projection;
    extra[kOwn + 1 + k] = there ? sum_of_patches(projection, k, patches) * unit : 0.0f;
  }
  if (threadIdx.x < 3) extra[threadIdx.x] = 0.0f;
  __syncthreads();
  Numbers& numbers = *room.numbers;
  for (uint32_t s = 0; s < first.shards; s++) {
    const Rows shard = first.of_shard(s);
    const Parts parts(args.scratch, shard);
    const float* const bounds = args.bounds + shard.first;
    const float energy =
        total(shard.real(), [&](size_t i) { return parts.row_sum[i]; }) * unit_squared;
    const float allowed = total(shard.real(), [&](size_t i) { return bounds[i]; });
    if (threadIdx.x != 0) continue;
    const float most = larger(kTiny, allowed * most_of(numbers, args.bound, args.ranks));
    const bool is_above = numbers.weight > 0 && energy > most;
    room.shares[s] = is_above ? sqrtf(most / energy) : 1.0f;
  }
  if (threadIdx.x == 0) set_step(numbers, args.momentum, args.unit);
}

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads)
    squares(const codecs::Batch<SquaresParams> batch) {
  const SquaresParams args = codecs::place_of_block(batch);
  const Rows& rows = args.rows;
  const Room room = room_of(args);
  const Parts parts(args.scratch, rows);
  const uint32_t patches = patches_of(rows), lane = codecs::lane_of_warp();
  const size_t tile = codecs::warp_of(args), block = tile / patches;
  const auto patch = static_cast<uint32_t>(tile % patches);
  const size_t first = block * kBlock;
  if (first < rows.real()) {
    const size_t end = first + kBlock < rows.real() ? first + kBlock : rows.real();
    const size_t begin = size_t{patch} * kPatch + lane;
    const auto* values = static_cast<const typename Value::Code*>(args.values);
    float column[kEach] = {}, signs[kEach] = {};
    for (int k = 0; args.signs != nullptr && k < kEach; k++) {
      const size_t j = begin + k * kLanes;
      if (j < rows.columns) signs[k] = args.signs[j];
    }
    for (size_t i = first; i < end; i += 2) {
      float x[kEach], y[kEach], of_x = 0.0f, of_y = 0.0f;
#pragma unroll
      for (int k = 0; k < kEach; k++) {
        const size_t j = begin + k * kLanes;
        const bool there = j < rows.columns;
        x[k] = there ? Value::decode(values[i * rows.columns + j]) : 0.0f;
        y[k] = there && i + 1 < end ? Value::decode(values[(i + 1) * rows.columns + j]) : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < kEach; k++) {
        const float of_one = x[k] * x[k], of_other = y[k] * y[k];
        of_x = of_x + of_one;
        of_y = of_y + of_other;
        column[k] = column[k] + (of_one + of_other);
      }
      of_x = sum_of_lanes(of_x);
      of_y = sum_of_lanes(of_y);
      if (lane == 0) {
        parts.row[i * patches + patch] = of_x;
        if (i + 1 < end) parts.row[(i + 1) * patches + patch] = of_y;
      }
      for (uint32_t r = 0; args.signs != nullptr && r < 2; r++) {
        const size_t row = rows.first + i + r, behind = row - args.first;
        if (i + r >= end || row < args.first || behind % args.stride != 0) continue;
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < kEach; k++) sum = sum + (r == 0 ? x[k] : y[k]) * signs[k];
        sum = sum_of_lanes(sum);
        if (lane == 0) parts.projection[behind / args.stride * patches + patch] = sum;
      }
    }
#pragma unroll
    for (int k = 0; k < kEach; k++) {
      const size_t j = begin + k * kLanes;
      if (j < rows.columns) parts.column[block * rows.columns + j] = column[k];
    }
  }
  if (is_last(&room.numbers->done[0], rows.shards * args.blocks.count)) finish_squares(args, room);
}

// ---------------------------------------------------------------- encode

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads) encode(const codecs::Batch<EncodeParams> batch) {
  const EncodeParams args = codecs::tensor_of_block(batch);
  const Rows& rows = args.rows;
  const Room room = room_of(args);
  const uint32_t patches = patches_of(rows), lane = codecs::lane_of_warp(), real = rows.real();
  float* const coded_parts = args.left + rows.cells();
  const size_t tile = codecs::warp_of(args), group = tile / patches;
  const auto patch = static_cast<uint32_t>(tile % patches);
  const size_t first = group * kEncodeRows;
  const float beta = room.numbers->beta * args.by_kept, rest = room.numbers->rest;
  const float share = room.shares[rows.shard];
  const float other = (1 - share) * beta;
  const bool goes_on = beta > 0;
  if (first < rows.count) {
    const size_t end = first + kEncodeRows < rows.count ? first + kEncodeRows : rows.count;
    const size_t begin = size_t{patch} * kPatch + lane;
    auto* values = static_cast<typename Value::Code*>(args.values);
    auto* copy = static_cast<typename Value::Code*>(args.copy);
    float by_column[kEach];
#pragma unroll
    for (int k = 0; k < kEach; k++) {
      const size_t j = begin + k * kLanes;
      by_column[k] = 1.0f;
      if (args.divides != 0 && j < args.rows.columns) by_column[k] = 1.0f / room.by_column[j];
    }
    for (size_t i = first; i < end; i++) {
      const float by_row = args.divides != 0 ? 1.0f / factor_of(room.by_row, rows, i) : 1.0f;
      const bool adds = goes_on && i < real;
      float g[kEach], m[kEach], e[kEach], left = 0.0f, coded = 0.0f;
#pragma unroll
      for (int k = 0; k < kEach; k++) {
        const size_t j = begin + k * kLanes, at = i * args.rows.columns + j;
        const bool there = j < args.rows.columns;
        g[k] = there ? Value::decode(values[at]) : 0.0f;
        m[k] = there && adds ? stored_value(args.momentum, args.momentum_form, at) : 0.0f;
        e[k] = there && args.stored != nullptr ? stored_value(args.stored, args.form, at) : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < kEach; k++) {
        const size_t j = begin + k * kLanes, at = i * args.rows.columns + j;
        const float sum = adds ? g[k] * rest + m[k] * beta : g[k] * rest;
        float p = sum * by_row * by_column[k];
        if (share < 1.0f) p = p * share;
        if (share < 1.0f && adds) p = p + m[k] * other * by_row * by_column[k];
        const float both = p + e[k];
        left = left + e[k] * e[k];
        coded = coded + both * both;
        if (j >= args.rows.columns) continue;
        const typename Value::Code code = Value::encode(p);
        values[at] = code;
        if (copy != nullptr) copy[at] = code;
      }
      if (args.stored == nullptr) continue;
      left = sum_of_lanes(left);
      coded = sum_of_lanes(coded);
      if (lane == 0) {
        args.left[i * patches + patch] = left;
        coded_parts[i * patches + patch] = coded;
      }
    }
  }
  if (args.stored == nullptr) return;
  if (!is_last(&room.numbers->done[1], rows.shards * args.blocks.count)) return;
  float* const errors = room.fresh + rows.all + rows.columns;
  const float* const first_left = args.left - rows.shard * rows.scratch_floats();
  for (uint32_t s = 0; s < rows.shards; s++) {
    const float* const left_parts = first_left + s * rows.scratch_floats();
    const float of_left =
        total(rows.count, [&](size_t i) { return sum_of_patches(left_parts, i, patches); });
    const float of_coded = total(rows.count, [&](size_t i) {
      return sum_of_patches(left_parts + rows.cells(), i, patches);
    });
    if (threadIdx.x == 0) {
      errors[kLeft] += of_left;
      errors[kCoded] += of_coded;
    }
  }
}

// ---------------------------------------------------------------- single values

/// The values of a warp in a matrix, one behind the other: a lane has every kLanes-th.
template <typename Params>
struct Walk {
  size_t i, end;
  uint32_t row, column, columns;

  __device__ explicit Walk(const Params& args) : columns(args.rows.columns) {
    const size_t begin = codecs::warp_of(args) * kPatch, numel = args.rows.numel();
    end = begin + kPatch < numel ? begin + kPatch : numel;
    i = begin + codecs::lane_of_warp();
    row = static_cast<uint32_t>(i / columns);
    column = static_cast<uint32_t>(i % columns);
  }
  __device__ bool there() const { return i < end; }
  __device__ void next() {
    i += kLanes;
    column += kLanes;
    while (column >= columns) {
      column -= columns;
      row++;
    }
  }
};

/// Stores a value of each lane, in one of the forms; called by all lanes of a warp, whose values
/// are neighbours that begin at a multiple of kLanes.
__device__ __forceinline__ void store_lanes(uint8_t* to, uint32_t form, size_t i, bool there,
                                            float value) {
  namespace stored = codecs::stored;
  static_assert(stored::kBlock == kLanes);
  if (form == stored::kInt8) {
    const float amax = bits_float(codecs::max_of_warp(there ? codecs::magnitude_bits(value) : 0));
    uint8_t* const block = to + i / stored::kBlock * stored::kBlockBytes;
    const float inv = codecs::inv_scale(amax, stored::kTop);
    // A block is stored whole, with zeros behind the last value.
    const bool written = __ballot_sync(~0u, there) != 0;
    if (!written) return;
    const int8_t code = there && codecs::used(amax) ? stored::code_of(value, inv) : int8_t{0};
    if (i % stored::kBlock == 0) *reinterpret_cast<float*>(block) = stored::scale_of(amax);
    block[sizeof(float) + i % stored::kBlock] = static_cast<uint8_t>(code);
    return;
  }
  if (!there) return;
  if (form == stored::kFloat32) {
    reinterpret_cast<float*>(to)[i] = value;
  } else {
    reinterpret_cast<uint16_t*>(to)[i] = stored::BFloat16::encode(value);
  }
}

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads) sent(const codecs::Batch<SentParams> batch) {
  const SentParams args = codecs::tensor_of_block(batch);
  const Room room = room_of(args);
  const uint8_t* const before = args.swapped != 0 ? args.after : args.before;
  const uint8_t* const after = args.swapped != 0 ? args.before : args.after;
  const auto* values = static_cast<const typename Value::Code*>(args.values);
  Walk<SentParams> at(args);
#pragma unroll
  for (int k = 0; k < kEach; k++, at.next()) {
    float x = 0.0f;
    if (at.there()) {
      x = Value::decode(values[at.i]);
      if (before != nullptr) {
        x = x + stored_value(before, args.form, at.i);
        x = x - stored_value(after, args.form, at.i);
      }
      if (args.divides != 0) {
        const float by_row = factor_of(room.by_row, args.rows, at.row) * args.kept;
        x = x * by_row * room.by_column[at.column];
      } else {
        x = x * args.kept;
      }
    }
    store_lanes(args.out, args.out_form, at.i, at.there(), x);
  }
}

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads) land(const codecs::Batch<LandParams> batch) {
  const LandParams args = codecs::place_of_block(batch);
  const Room room = room_of(args);
  auto* values = static_cast<typename Value::Code*>(args.values);
  Walk<LandParams> at(args);
  Probe probe{};
#pragma unroll
  for (int k = 0; k < kEach; k++, at.next()) {
    if (!at.there()) continue;
    float x = Value::decode(values[at.i]);
    if (args.divides != 0 || args.unit != 1.0f) {
      float by_row = args.unit, by_column = 1.0f;
      if (args.divides != 0) {
        by_row = factor_of(room.by_row, args.rows, at.row) * args.unit;
        by_column = room.by_column[at.column];
      }
      const typename Value::Code code = Value::encode(x * by_row * by_column);
      values[at.i] = code;
      x = Value::decode(code);
    }
    if (at.i < args.rows.values()) look_at(probe, static_cast<uint32_t>(at.i), x);
  }
  if (codecs::block_of(args) != 0) return;
  static_assert(kProbed == cuda::kThreads * kEach);
  __shared__ Probe probes[cuda::kThreads];
  probes[threadIdx.x] = probe;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int thread = 1; thread < cuda::kThreads; thread++) {
    const Probe& other = probes[thread];
    look_at(probe, other.at[0], other.value[0]);
    look_at(probe, other.at[1], other.value[1]);
  }
  room.numbers->probe = probed(probe, args.unit);
}

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads) move(const codecs::Batch<MoveParams> batch) {
  const MoveParams& args = codecs::place_of_block(batch);
  const Room room = room_of(args);
  auto* values = static_cast<typename Value::Code*>(args.values);
  auto* momentum = static_cast<typename Value::Code*>(args.momentum);
  const auto* gradient = static_cast<const typename Value::Code*>(args.gradient);
  const bool divides = args.divides != 0;
  const bool known = !divides || room.numbers->weight > 0;
  const bool limited = divides && room.numbers->steps > 0;
  float by = args.kept;
  if (known && args.probed != 0) {
    const Probe probe = room.numbers->probe;
    const float first = Value::decode(gradient[probe.at[0]]);
    const float second = Value::decode(gradient[probe.at[1]]);
    const float tolerance = sizeof(typename Value::Code) == 4 ? kTolerance : kTolerance16;
    by = by * restoring(probe, first, second, tolerance);
  }
  Walk<MoveParams> at(args);
#pragma unroll
  for (int k = 0; k < kEach; k++, at.next()) {
    if (!at.there()) continue;
    float moved = Value::decode(gradient[at.i]);
    const float kept = moved * by;
    momentum[at.i] = Value::encode(kept);
    if (!known) continue;
    if (divides)
      moved =
          kept * room.reciprocal_row[args.rows.first + at.row] * room.reciprocal_column[at.column];
    if (limited) {
      moved = moved > args.limit ? args.limit : moved;  // a NaN stays one
      moved = moved < -args.limit ? -args.limit : moved;
    }
    const float x = Value::decode(values[at.i]);
    values[at.i] = Value::encode(x * args.keep - moved * args.lr);
  }
}

// ---------------------------------------------------------------- a step's sums

/// The threads of a block.
struct Block {
  template <typename Act>
  __device__ void each(size_t count, const Act& act) const {
    for (size_t i = threadIdx.x; i < count; i += cuda::kThreads) act(i);
  }
  template <typename At>
  __device__ float total(size_t count, const At& at) const {
    return moments::total(count, at);
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
    if (threadIdx.x == 0) found = act();
    __syncthreads();
    return found;
  }
  __device__ void sync() const { __syncthreads(); }
};

// A matrix is that of a block of threads.

__global__ void __launch_bounds__(cuda::kThreads)
    collect(const codecs::Batch<CollectParams> batch) {
  const CollectParams args = codecs::place_of_block(batch);
  Block block;
  write_means(block, args);
}

__global__ void __launch_bounds__(cuda::kThreads) commit(const codecs::Batch<CommitParams> batch) {
  const CommitParams args = codecs::place_of_block(batch);
  Block block;
  take_commit(block, args);
}

}  // namespace pycomm::moments

namespace pycomm::codecs {

#define OF_VALUES(kernel)                                    \
  PYCOMM_KERNEL(pycomm::moments::kernel<cast::Float32>),     \
      PYCOMM_KERNEL(pycomm::moments::kernel<cast::Float16>), \
      PYCOMM_KERNEL(pycomm::moments::kernel<cast::BFloat16>)
PYCOMM_KERNELS(moments, OF_VALUES(squares), OF_VALUES(encode), OF_VALUES(sent), OF_VALUES(land),
               OF_VALUES(move), PYCOMM_KERNEL(pycomm::moments::collect),
               PYCOMM_KERNEL(pycomm::moments::commit));
#undef OF_VALUES

}  // namespace pycomm::codecs
