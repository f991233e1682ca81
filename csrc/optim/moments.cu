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

namespace pycomm::moments {

// ---------------------------------------------------------------- values

/// Lanes of a patch: a lane has every kLanes-th value.
constexpr int kEach = kPatch / kLanes;
static_assert(kLanes == cuda::kLanes);

__device__ __forceinline__ uint32_t patches_of(uint32_t columns) {
  return static_cast<uint32_t>((columns + kPatch - 1) / kPatch);
}

/// Returns the room of a matrix; nulls: it has no factors.
template <typename Params>
__device__ __forceinline__ Room room_of(const Params& args) {
  return args.room == nullptr ? Room{} : room_at(args.room, args.rows, args.columns);
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

/// The larger one, as std::max.
__device__ __forceinline__ float larger(float x, float y) { return x < y ? y : x; }

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

/// Parts of the sums of a matrix, in scratch memory.
struct Parts {
  float* row;         ///< [rows, patches]; then [rows]
  float* row_sum;     ///< [rows]
  float* column;      ///< [blocks, columns]
  float* projection;  ///< [kProjections, patches]

  __device__ Parts(float* at, uint32_t rows, uint32_t columns) {
    const size_t patches = patches_of(columns), cells = rows * patches;
    row = at;
    row_sum = row + cells;
    column = row_sum + rows;
    projection = column + (rows + kBlock - 1) / kBlock * columns;
  }
};

/// Returns the sum of a row's parts.
__device__ __forceinline__ float sum_of_patches(const float* parts, size_t row, uint32_t patches) {
  float sum = 0.0f;
  for (uint32_t p = 0; p < patches; p++) sum = sum + fresh(parts + row * patches + p);
  return sum;
}

// ---------------------------------------------------------------- squares

/// Returns the squares of the ranks' mean over the mean of their squares, as
/// momentum/agreement.py does.
__device__ inline double share_of(double of_mean, double own, uint32_t ranks) {
  if (!(own > 0)) return 1.0;
  const double least = 1.0 / ranks, found = of_mean / own;
  const double bounded = found > least ? found : least;
  return rint(256 * (bounded < 1.0 ? bounded : 1.0)) / 256;
}

/// Returns the coefficient of a coded momentum, as `shortened` of momentum/moment.py
/// does.
__device__ inline double shortened(double momentum, double error) {
  if (error == 0) return momentum;
  error = error < 0.99 ? error : 0.99;
  const double found = floor(1024 * (momentum - error) / (1 - error)) / 1024;
  return found > 0 ? found : 0.0;
}

/// Adds up what the blocks have found, and decides by how much the gradient counts.
__device__ inline void finish_squares(const SquaresParams& args, const Room& room,
                                      const Parts& parts) {
  const uint32_t patches = patches_of(args.columns);
  float* const columns = room.fresh + args.rows;
  float* const extra = columns + args.columns;
  const float unit_squared = args.unit_squared;
  for (size_t i = threadIdx.x; i < args.rows; i += cuda::kThreads) {
    const float sum = sum_of_patches(parts.row, i, patches);
    parts.row_sum[i] = sum;
    room.fresh[i] = sum * unit_squared;
  }
  const size_t blocks = (args.rows + kBlock - 1) / kBlock;
  for (size_t j = threadIdx.x; j < args.columns; j += cuda::kThreads) {
    float sum = fresh(parts.column + j);
#pragma unroll 8
    for (size_t b = 1; b < blocks; b++) sum = sum + fresh(parts.column + b * args.columns + j);
    columns[j] = sum * unit_squared;
  }
  for (size_t k = threadIdx.x; k < kProjections; k += cuda::kThreads) {
    const bool there = args.signs != nullptr && args.first + k * args.stride < args.rows;
    const float found = there ? sum_of_patches(parts.projection, k, patches) * args.unit : 0.0f;
    extra[kOwn + 1 + k] = found;
  }
  if (threadIdx.x < 3) extra[threadIdx.x] = 0.0f;
  __syncthreads();
  const float energy = total(args.rows, [&](size_t i) { return parts.row_sum[i]; }) * unit_squared;
  const float bounds = total(args.rows, [&](size_t i) { return args.bounds[i]; });
  if (threadIdx.x != 0) return;
  Numbers& numbers = *room.numbers;
  const double own = numbers.weight * share_of(numbers.mean_energy, numbers.own_energy, args.ranks);
  const auto allowed = static_cast<float>(double{args.bound} * args.bound / own);
  const float most = larger(kTiny, bounds * allowed);
  const bool is_above = numbers.weight > 0 && energy > most;
  const float share = is_above ? sqrtf(most / energy) : 1.0f;
  const double beta = shortened(args.momentum, numbers.coding_error);
  numbers.beta = static_cast<float>(beta);
  numbers.rest = static_cast<float>((1 - beta) * args.unit);
  numbers.share = share;
}

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads)
    squares(const codecs::Batch<SquaresParams> batch) {
  const SquaresParams args = codecs::place_of_block(batch);
  const Room room = room_at(args.room, args.rows, args.columns);
  const Parts parts(args.scratch, args.rows, args.columns);
  const uint32_t patches = patches_of(args.columns), lane = codecs::lane_of_warp();
  const size_t tile = codecs::warp_of(args), block = tile / patches;
  const auto patch = static_cast<uint32_t>(tile % patches);
  const size_t first = block * kBlock;
  if (first < args.rows) {
    const size_t end = first + kBlock < args.rows ? first + kBlock : args.rows;
    const size_t begin = size_t{patch} * kPatch + lane;
    const auto* values = static_cast<const typename Value::Code*>(args.values);
    float column[kEach] = {}, signs[kEach] = {};
    for (int k = 0; args.signs != nullptr && k < kEach; k++) {
      const size_t j = begin + k * kLanes;
      if (j < args.columns) signs[k] = args.signs[j];
    }
    for (size_t i = first; i < end; i += 2) {
      float x[kEach], y[kEach], of_x = 0.0f, of_y = 0.0f;
#pragma unroll
      for (int k = 0; k < kEach; k++) {
        const size_t j = begin + k * kLanes;
        const bool there = j < args.columns;
        x[k] = there ? Value::decode(values[i * args.columns + j]) : 0.0f;
        y[k] = there && i + 1 < end ? Value::decode(values[(i + 1) * args.columns + j]) : 0.0f;
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
        if (i + r < args.first || i + r >= end) continue;
        const size_t behind = i + r - args.first;
        if (behind % args.stride != 0) continue;
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
      if (j < args.columns) parts.column[block * args.columns + j] = column[k];
    }
  }
  if (is_last(&room.numbers->done[0], args.blocks.count)) finish_squares(args, room, parts);
}

// ---------------------------------------------------------------- encode

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads) encode(const codecs::Batch<EncodeParams> batch) {
  const EncodeParams args = codecs::tensor_of_block(batch);
  const Room room = room_of(args);
  const uint32_t patches = patches_of(args.columns), lane = codecs::lane_of_warp();
  float* const coded_parts = args.left + size_t{args.rows} * patches;
  const size_t tile = codecs::warp_of(args), group = tile / patches;
  const auto patch = static_cast<uint32_t>(tile % patches);
  const size_t first = group * kEncodeRows;
  const Numbers* const numbers = room.numbers;
  const float beta = numbers != nullptr ? numbers->beta : args.beta;
  const float rest = numbers != nullptr ? numbers->rest : args.rest;
  const float share = numbers != nullptr ? numbers->share : 1.0f;
  const float other = (1 - share) * beta;
  const bool goes_on = beta > 0;
  if (first < args.rows) {
    const size_t end = first + kEncodeRows < args.rows ? first + kEncodeRows : args.rows;
    const size_t begin = size_t{patch} * kPatch + lane;
    auto* values = static_cast<typename Value::Code*>(args.values);
    auto* copy = static_cast<typename Value::Code*>(args.copy);
    float by_column[kEach];
#pragma unroll
    for (int k = 0; k < kEach; k++) {
      const size_t j = begin + k * kLanes;
      by_column[k] = 1.0f;
      if (args.divides != 0 && j < args.columns) by_column[k] = 1.0f / room.by_column[j];
    }
    for (size_t i = first; i < end; i++) {
      const float by_row = args.divides != 0 ? 1.0f / room.by_row[i] : 1.0f;
      float g[kEach], m[kEach], e[kEach], left = 0.0f, coded = 0.0f;
#pragma unroll
      for (int k = 0; k < kEach; k++) {
        const size_t j = begin + k * kLanes, at = i * args.columns + j;
        const bool there = j < args.columns;
        g[k] = !there                     ? 0.0f
               : args.gradient == nullptr ? Value::decode(values[at])
                                          : stored_value(args.gradient, args.gradient_form, at);
        if (there && args.parameter != nullptr) {
          g[k] = g[k] + stored_value(args.parameter, args.parameter_form, at) * args.decay;
        }
        m[k] = there && goes_on ? stored_value(args.momentum, args.momentum_form, at) : 0.0f;
        e[k] = there && args.stored != nullptr ? stored_value(args.stored, args.form, at) : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < kEach; k++) {
        const size_t j = begin + k * kLanes, at = i * args.columns + j;
        const float sum = goes_on ? g[k] * rest + m[k] * beta : g[k] * rest;
        float p = sum * by_row * by_column[k];
        if (share < 1.0f) p = p * share;
        if (share < 1.0f && goes_on) p = p + m[k] * other * by_row * by_column[k];
        const float both = p + e[k];
        left = left + e[k] * e[k];
        coded = coded + both * both;
        if (j >= args.columns) continue;
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
  const bool own = args.errors != nullptr;
  auto* const done = own ? reinterpret_cast<uint32_t*>(args.errors + 2) : &room.numbers->done[1];
  if (!is_last(done, args.blocks.count)) return;
  float* const errors = own ? args.errors : room.fresh + args.rows + args.columns;
  const float of_left =
      total(args.rows, [&](size_t i) { return sum_of_patches(args.left, i, patches); });
  const float of_coded =
      total(args.rows, [&](size_t i) { return sum_of_patches(coded_parts, i, patches); });
  if (threadIdx.x == 0) {
    errors[kLeft] += of_left;
    errors[kCoded] += of_coded;
  }
}

// ---------------------------------------------------------------- single values

/// The values of a warp in a matrix, one behind the other: a lane has every kLanes-th.
template <typename Params>
struct Walk {
  size_t i, end;
  uint32_t row, column, columns;

  __device__ explicit Walk(const Params& args) : columns(args.columns) {
    const size_t begin = codecs::warp_of(args) * kPatch, numel = size_t{args.rows} * columns;
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
      if (args.room != nullptr) x = x * room.by_row[at.row] * room.by_column[at.column];
    }
    store_lanes(args.out, args.out_form, at.i, at.there(), x);
  }
}

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads) land(const codecs::Batch<LandParams> batch) {
  const LandParams args = codecs::place_of_block(batch);
  const Room room = room_at(args.room, args.rows, args.columns);
  auto* values = static_cast<typename Value::Code*>(args.values);
  Walk<LandParams> at(args);
  Probe probe{};
#pragma unroll
  for (int k = 0; k < kEach; k++, at.next()) {
    if (!at.there()) continue;
    float x = Value::decode(values[at.i]);
    if (args.divides != 0) {
      const typename Value::Code code =
          Value::encode(x * (room.by_row[at.row] * args.unit) * room.by_column[at.column]);
      values[at.i] = code;
      x = Value::decode(code);
    }
    look_at(probe, static_cast<uint32_t>(at.i), x);
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
  for (float& value : probe.value) value = value / args.unit;
  room.numbers->probe = probe;
}

template <typename Value>
__global__ void __launch_bounds__(cuda::kThreads) move(const codecs::Batch<MoveParams> batch) {
  const MoveParams& args = codecs::place_of_block(batch);
  const Room room = room_of(args);
  auto* values = static_cast<typename Value::Code*>(args.values);
  auto* momentum = static_cast<typename Value::Code*>(args.momentum);
  const bool divides = args.room != nullptr;
  const bool known = !divides || room.numbers->weight > 0;
  const bool limited = divides && room.numbers->steps > 0;
  float restore = 1.0f;
  if (known && args.probed != 0) {
    const Probe probe = room.numbers->probe;
    const float first = stored_value(args.gradient, args.gradient_form, probe.at[0]);
    const float second = stored_value(args.gradient, args.gradient_form, probe.at[1]);
    const float tolerance = sizeof(typename Value::Code) == 4 ? kTolerance : kTolerance16;
    restore = restoring(probe, first, second, tolerance);
  }
  Walk<MoveParams> at(args);
#pragma unroll
  for (int k = 0; k < kEach; k++, at.next()) {
    if (!at.there()) continue;
    const float now = stored_value(args.gradient, args.gradient_form, at.i) * restore;
    if (momentum != nullptr) momentum[at.i] = Value::encode(now);
    if (!known) continue;
    float moved = now;
    if (divides) moved = now * room.reciprocal_row[at.row] * room.reciprocal_column[at.column];
    if (limited) {
      moved = moved > args.limit ? args.limit : moved;  // a NaN stays one
      moved = moved < -args.limit ? -args.limit : moved;
    }
    const float x = Value::decode(values[at.i]);
    values[at.i] = Value::encode(x * args.keep - moved * args.lr);
  }
}

// ---------------------------------------------------------------- a step's sums

/// Writes this rank's mean sums of the steps since the last exchange, to be averaged.
__global__ void __launch_bounds__(cuda::kThreads)
    collect(const codecs::Batch<CollectParams> batch) {
  const CollectParams args = codecs::place_of_block(batch);
  const Room room = room_at(args.room, args.rows, args.columns);
  const size_t sums = size_t{args.rows} + args.columns, numel = sums + kExtra;
  const float steps = room.numbers->steps;
  const size_t i = size_t{codecs::block_of(args)} * cuda::kThreads + threadIdx.x;
  if (i < numel && i != sums + kOwn) {
    const bool mean = steps > 0 && i < sums + kOwn;  // projections are of this step alone
    args.out[i] = mean ? (room.since[i] + room.fresh[i]) / (steps + 1) : room.fresh[i];
  }
  if (codecs::block_of(args) == 0 && codecs::warp_of_block() == 0) {
    const float* const projections = room.fresh + sums + kOwn + 1;
    float sum = 0.0f;
    for (size_t k = codecs::lane_of_warp(); k < kProjections; k += kLanes) {
      sum = sum + projections[k] * projections[k];
    }
    sum = sum_of_lanes(sum);
    if (codecs::lane_of_warp() == 0) args.out[sums + kOwn] = sum;
  }
}

/// Moves a number by a share of 1 - decay to a new one, and returns it.
__device__ __forceinline__ double decayed(float& number, double decay, double now) {
  number = static_cast<float>(decay * number + (1 - decay) * now);
  return number;
}

/// Folds the ranks' sums into the second moments; or adds this step's to those that wait.
__device__ inline void fold(const CommitParams& args, const Room& room) {
  __shared__ float decay_of_sums, weight_of_sums;
  Numbers& numbers = *room.numbers;
  const size_t sums = size_t{args.rows} + args.columns, numel = sums + kExtra;
  const auto ranks = static_cast<float>(args.ranks);
  int wrong = 0;
  const float* const checked = args.sums != nullptr ? args.sums : room.fresh;
  for (size_t i = threadIdx.x; i < numel; i += cuda::kThreads)
    wrong |= !codecs::is_finite(checked[i]);
  bool finite = __syncthreads_or(wrong) == 0;
  float of_mean = 0.0f;
  if (args.sums != nullptr) {
    for (size_t k = codecs::lane_of_warp(); k < kProjections; k += kLanes) {
      const float mean = args.sums[sums + kOwn + 1 + k] / ranks;
      of_mean = of_mean + mean * mean;
    }
    of_mean = sum_of_lanes(of_mean);
    finite = finite && codecs::is_finite(of_mean);
  }
  const double decay = numbers.decay * args.beta2;  // a schedule may change it
  const double slow = heard_decay(static_cast<int>(numbers.steps) + 1);
  const auto more = static_cast<float>(numbers.steps);
  __syncthreads();  // all threads have read the numbers
  if (args.sums == nullptr || !finite) {
    bool adds = finite;
    if (args.sums != nullptr) {
      wrong = 0;
      for (size_t i = threadIdx.x; i < numel; i += cuda::kThreads) {
        wrong |= !codecs::is_finite(room.fresh[i]);
      }
      adds = __syncthreads_or(wrong) == 0;
    }
    for (size_t i = threadIdx.x; adds && i < numel; i += cuda::kThreads) {
      room.since[i] = room.since[i] + room.fresh[i];
    }
    if (threadIdx.x == 0) {
      numbers.decay = decay;
      numbers.steps = numbers.steps + 1;
    }
    return;
  }
  if (threadIdx.x == 0) {
    const double left = args.sums[sums + kLeft] / ranks, coded = args.sums[sums + kCoded] / ranks;
    const double own = args.sums[sums + kOwn] / ranks;
    const double mean_energy = decayed(numbers.mean_energy, decay, of_mean);
    const double own_energy = decayed(numbers.own_energy, decay, own);
    decayed(numbers.weight, decay, 1.0);
    decay_of_sums = static_cast<float>(decay);
    weight_of_sums =
        static_cast<float>((1 - decay) * share_of(mean_energy, own_energy, args.ranks));
    if (left > 0 && coded > 0) {
      const double error = left / coded;
      decayed(numbers.coding_error, 0.75, error < 1.0 ? error : 1.0);
    }
    numbers.decay = 1.0;
    numbers.steps = 0;
  }
  __syncthreads();
  for (size_t i = threadIdx.x; i < sums; i += cuda::kThreads) {
    float& to = i < args.rows ? args.row[i] : args.column[i - args.rows];
    to = to * decay_of_sums + args.sums[i] / ranks * weight_of_sums;
  }
  const auto kept = static_cast<float>(slow), rest = static_cast<float>(1 - slow);
  const auto listen = [&](size_t begin, size_t count) {
    const auto at = [&](size_t i) { return args.sums[begin + i] / ranks; };
    const float mean = larger(kTiny, total(count, at) / static_cast<float>(count));
    const auto heard_at = [&](size_t i) { return args.heard[begin + i]; };
    const float known = total(count, heard_at) / static_cast<float>(count);
    for (size_t i = threadIdx.x; i < count; i += cuda::kThreads) {
      float* const heard = args.heard + begin + i;
      hear(heard[0], heard[sums], at(i) / mean, known, more, kept, rest);
    }
  };
  listen(0, args.rows);
  listen(args.rows, args.columns);
  for (size_t i = threadIdx.x; i < numel; i += cuda::kThreads) room.since[i] = 0.0f;
}

/// Returns the share that row or column i, counted behind the rows, has of the floor's square.
__device__ __forceinline__ float floor_of(const CommitParams& args, size_t i) {
  return floor_share(args.heard[i], args.heard[size_t{args.rows} + args.columns + i]);
}

/// Writes factors of second moments, which are row(i) and column(j); see factors() of moments.h.
/// `share`: of the floor's square, of row or column i, counted behind the rows.
template <typename Row, typename Column, typename Share>
__device__ void write_factors(const CommitParams& args, const Room& room, float weight,
                              const Row& row, const Column& column, const Share& share) {
  const float of_columns = total(args.columns, column);
  const float all = larger(kTiny, of_columns * weight);
  const float root_row = sqrtf(of_columns / all / static_cast<float>(args.rows));
  const float root_column = sqrtf(of_columns / static_cast<float>(args.columns));
  const float least_row = kFloor * root_row, least_column = kFloor * root_column;
  for (size_t i = threadIdx.x; i < args.rows; i += cuda::kThreads) {
    const float least = larger(kTiny, least_row * sqrtf(share(i)));
    room.by_row[i] = larger(least, sqrtf(row(i) / all));
  }
  for (size_t j = threadIdx.x; j < args.columns; j += cuda::kThreads) {
    const float least = larger(kTiny, least_column * sqrtf(share(args.rows + j)));
    room.by_column[j] = larger(least, sqrtf(column(j)));
  }
}

/// See reciprocal_factors() of moments.h.
__device__ inline void write_reciprocals(const CommitParams& args, const Room& room) {
  const float weight = room.numbers->weight;
  const double eps = args.eps > 1e-12 ? args.eps : 1e-12;
  const auto least = static_cast<float>(weight * (eps * eps));
  const auto rows = static_cast<float>(args.rows), columns = static_cast<float>(args.columns);
  const float by_column = least * rows, by_row = least * columns;
  const auto column = [&](size_t j) { return args.column[j] + by_column; };
  const float of_columns = total(args.columns, column);
  const float all = of_columns * weight;
  const float least_row = kFloor * kFloor * (of_columns / rows);
  const float least_column = kFloor * kFloor * (of_columns / columns);
  for (size_t i = threadIdx.x; i < args.rows; i += cuda::kThreads) {
    const float lowest = least_row * floor_of(args, i);
    room.reciprocal_row[i] = sqrtf(all / larger(lowest, args.row[i] + by_row));
  }
  for (size_t j = threadIdx.x; j < args.columns; j += cuda::kThreads) {
    const float lowest = least_column * floor_of(args, args.rows + j);
    room.reciprocal_column[j] = 1 / sqrtf(larger(lowest, column(j)));
  }
}

/// Makes the ranks' sums of one step the scale of its coding. What is not finite overflows anyway.
__device__ inline void scale(const CommitParams& args, const Room& room) {
  const auto ranks = static_cast<float>(args.ranks);
  const auto rows = static_cast<float>(args.rows), columns = static_cast<float>(args.columns);
  int wrong = 0;
  for (size_t i = threadIdx.x; i < size_t{args.rows} + args.columns; i += cuda::kThreads) {
    wrong |= !codecs::is_finite(args.sums[i]);
  }
  const bool finite = __syncthreads_or(wrong) == 0;
  write_factors(
      args, room, 1.0f, [&](size_t i) { return finite ? args.sums[i] / ranks : columns; },
      [&](size_t j) { return finite ? args.sums[args.rows + j] / ranks : rows; },
      [](size_t) { return 1.0f; });
}

/// Takes the ranks' sums, a matrix by each block of threads.
__global__ void __launch_bounds__(cuda::kThreads) commit(const codecs::Batch<CommitParams> batch) {
  const CommitParams args = codecs::place_of_block(batch);
  const Room room = room_at(args.room, args.rows, args.columns);
  if (args.use == kScale) return scale(args, room);
  if (args.use == kStep) fold(args, room);
  __syncthreads();
  const float weight = room.numbers->weight;
  if (!(weight > 0)) return;
  write_factors(
      args, room, weight, [&](size_t i) { return args.row[i]; },
      [&](size_t j) { return args.column[j]; }, [&](size_t i) { return floor_of(args, i); });
  write_reciprocals(args, room);
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
