#include "optim/moments.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <system_error>
#include <thread>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "codecs/base/feedback.h"
#include "codecs/base/launch.h"
#include "codecs/base/loops.h"
#include "codecs/cast.h"
#include "core/arithmetic.h"
#include "core/error.h"
#include "optim/moments_passes.h"

namespace pycomm::moments {
namespace {

namespace stored = codecs::stored;
using codecs::stored::kFloat32, codecs::stored::kInt8;

static_assert(kLanes == 32 && kLanes == stored::kBlock);

// ------------------------------------------------------------------------------ a warp of the host

// A vector of the compiler's, which each level of SIMD holds in as many registers as it needs.
using Eight = float __attribute__((vector_size(32), aligned(4), may_alias));

/// A float of each lane. Four members and no array, which stay in registers.
struct Lanes {
  Eight a, b, c, d;

  Lanes() = default;
  PYCOMM_HD Lanes(Eight a, Eight b, Eight c, Eight d) : a(a), b(b), c(c), d(d) {}
  PYCOMM_HD Lanes(float x) {
    float room[kLanes];  // a vector's values would be put in one by one
    for (float& each : room) each = x;
    *this = at(room);
  }

  PYCOMM_HD static Lanes at(const float* x) {
    const auto* from = reinterpret_cast<const Eight*>(x);
    return {from[0], from[1], from[2], from[3]};
  }
  PYCOMM_HD void to(float* x) const {
    auto* out = reinterpret_cast<Eight*>(x);
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
  }
};
PYCOMM_HD Lanes operator+(const Lanes& x, const Lanes& y) {
  return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d};
}
PYCOMM_HD Lanes operator-(const Lanes& x, const Lanes& y) {
  return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d};
}
PYCOMM_HD Lanes operator*(const Lanes& x, const Lanes& y) {
  return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d};
}

// Of values that are fewer than lanes, these loops become loads and stores with a mask. A call of
// memcpy would store all vectors.

/// Decodes values; zeros are in the lanes behind them.
template <typename Form>
PYCOMM_HD Lanes decoded(const void* from, int count) {
  const auto* const codes = static_cast<const typename Form::Code*>(from);
  if constexpr (sizeof *codes == sizeof(float)) {
    if (count == kApart) return Lanes::at(codes);
  }
  float room[kLanes];
  if (count == kApart) {
    for (int l = 0; l < kApart; l++) room[l] = Form::decode(codes[l]);
  } else {
    for (int l = 0; l < kApart; l++) room[l] = l < count ? Form::decode(codes[l]) : 0.0f;
  }
  return Lanes::at(room);
}
template <typename Form>
PYCOMM_HD void encode(const Lanes& x, int count, void* to) {
  auto* const codes = static_cast<typename Form::Code*>(to);
  if constexpr (sizeof *codes == sizeof(float)) {
    if (count == kApart) return x.to(codes);
  }
  float room[kLanes];
  x.to(room);
  if (count == kApart) {
    for (int l = 0; l < kApart; l++) codes[l] = Form::encode(room[l]);
  } else {
    for (int l = 0; l < kApart; l++) {
      if (l < count) codes[l] = Form::encode(room[l]);
    }
  }
}

/// `kPlain`: all arrays are of floats, and rows of whole lanes, as in most passes, which take
/// half of the time where nothing decides about that.
template <bool kPlain>
struct Warp {
  using Lanes = moments::Lanes;
  static constexpr bool kInMemory = true;
  static constexpr int kAhead = 1;
  static constexpr size_t kNeighbours = 8 * kPatch;
  /// put() writes past the caches, which do not hold the pass and would read the memory first.
  bool far;

  PYCOMM_HD static bool has(int k, int left) { return k * kApart < left; }
  PYCOMM_HD static int there(int left, int k) {
    const int count = left - k * kApart;
    return count <= 0 ? 0 : count < kApart && !kPlain ? count : kApart;
  }
  PYCOMM_HD static bool takes(int, int) { return true; }
  PYCOMM_HD static bool leads() { return true; }
  PYCOMM_HD static Place place(const Rows& rows, size_t i) {
    return {static_cast<uint32_t>(i / rows.columns), static_cast<uint32_t>(i % rows.columns)};
  }
  /// Returns at(row, column) for each lane.
  template <typename At>
  PYCOMM_HD static Lanes each(Place place, const Rows& rows, const At& at) {
    float room[kLanes];
    for (float& value : room) {
      value = at(place.row, place.column);
      if (++place.column < rows.columns) continue;
      place.column = 0;
      place.row++;
    }
    return Lanes::at(room);
  }
  PYCOMM_HD static bool in_one_row(const Place& place, const Rows& rows) {
    return kPlain || place.column + kLanes <= rows.columns;
  }
  PYCOMM_HD static Lanes by_row(const Place& place, const Rows& rows, const float* factors) {
    if (in_one_row(place, rows)) return factor_of(factors, rows, place.row);
    return each(place, rows, [&](size_t i, size_t) { return factor_of(factors, rows, i); });
  }
  PYCOMM_HD static Lanes by_column(const Place& place, const Rows& rows, const float* factors) {
    if (in_one_row(place, rows)) return Lanes::at(factors + place.column);
    return each(place, rows, [&](size_t, size_t j) { return factors[j]; });
  }

  PYCOMM_HD static Lanes load(const float* from, size_t i, int left, int k) {
    return decoded<stored::Float32>(from + i + k * kLanes, there(left, k));
  }
  template <typename Value>
  PYCOMM_HD static Lanes load(const Array<Value>& from, size_t i, int left, int k) {
    return decoded<Value>(from.at + i + k * kLanes, there(left, k));
  }
  PYCOMM_HD static Lanes load(const void* from, uint32_t form, size_t i, int left, int k) {
    const int count = there(left, k);
    if (count == 0) return 0.0f;
    if (kPlain || form == kFloat32) return load(static_cast<const float*>(from), i, left, k);
    i += k * kLanes;
    const auto* const codes = static_cast<const uint16_t*>(from) + i;
    if (form == kFloat16) return decoded<codecs::cast::Float16>(codes, count);
    if (form == kBFloat16) return decoded<codecs::cast::BFloat16>(codes, count);
    const auto* const block =
        static_cast<const uint8_t*>(from) + i / stored::kBlock * stored::kBlockBytes;
    const int first = static_cast<int>(i % stored::kBlock);
    float room[2 * kLanes];
    codecs::load_block(block, room);
    if (first + count > kApart) codecs::load_block(block + stored::kBlockBytes, room + kLanes);
    return decoded<stored::Float32>(room + first, count);
  }

  PYCOMM_HD static void store(float* to, size_t i, int left, int k, const Lanes& x) {
    moments::encode<stored::Float32>(x, there(left, k), to + i + k * kLanes);
  }
  template <typename Value>
  PYCOMM_HD static void store(const Array<Value>& to, size_t i, int left, int k, const Lanes& x) {
    moments::encode<Value>(x, there(left, k), to.at + i + k * kLanes);
  }
  template <typename Value>
  PYCOMM_HD void put(const Array<Value>& to, size_t i, int left, int k, const Lanes& x) const {
#ifdef __SSE2__
    if constexpr (Array<Value>::is_float32()) {
      float* const at = to.at + i + k * kLanes;
      if (far && there(left, k) == kApart && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
        float room[kLanes];
        x.to(room);
        for (size_t l = 0; l < kLanes; l += 4) _mm_stream_ps(at + l, _mm_loadu_ps(room + l));
        return;
      }
    }
#endif
    store(to, i, left, k, x);
  }
  /// i is a multiple of kLanes.
  PYCOMM_HD void store(uint8_t* to, uint32_t form, size_t i, int left, int k,
                       const Lanes& x) const {
    if (kPlain || form == kFloat32) return put(Array<stored::Float32>(to), i, left, k, x);
    i += k * kLanes;
    const int count = there(left, k);
    float room[kLanes];
    x.to(room);
    std::fill(room + count, room + kLanes, 0.0f);
    codecs::store_block(room, to + i / stored::kBlock * stored::kBlockBytes);
  }

  PYCOMM_HD static Lanes clamped(const Lanes& x, float limit) {
    float room[kLanes];
    x.to(room);
    for (float& value : room) {
      value = value > limit ? limit : value;
      value = value < -limit ? -limit : value;
    }
    return Lanes::at(room);
  }
  PYCOMM_HD static void look(Probe& probe, size_t i, int left, int k, const Lanes& x) {
    float room[kLanes];
    x.to(room);
    for (int l = 0; l < there(left, k); l++) {
      look_at(probe, static_cast<uint32_t>(i + k * kLanes + l), room[l]);
    }
  }
  PYCOMM_HD static float sum(const Lanes& x) {
    float lane[8];
    *reinterpret_cast<Eight*>(lane) = (x.a + x.c) + (x.b + x.d);
    for (size_t l = 0; l < 4; l++) lane[l] += lane[l + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
  }
};

// ------------------------------------------------------------------------------ a team

PYCOMM_SIMD float sum_of_patch(const float* patch, size_t count) {
  Lanes lanes(0.0f);
  const int left = static_cast<int>(count);
  for (int k = 0; Warp<false>::has(k, left); k++) {
    lanes = lanes + Warp<false>::load(patch, 0, left, k);
  }
  return Warp<false>::sum(lanes);
}

/// Adds up so many rows in the first one.
PYCOMM_SIMD void add_rows(float* rows, size_t count, size_t columns) {
  for (size_t i = 1; i < count; i++) {
    for (size_t j = 0; j < columns; j++) rows[j] = rows[j] + rows[i * columns + j];
  }
}

/// A thread that works alone.
struct Alone {
  template <typename Act>
  void each(size_t count, const Act& act) const {
    for (size_t i = 0; i < count; i++) act(i);
  }
  template <typename At>
  float total(size_t count, const At& at) const {
    float sum = 0;
    for (size_t j = 0; j < count; j += kPatch) {
      float patch[kPatch];
      const size_t end = std::min(kPatch, count - j);
      for (size_t k = 0; k < end; k++) patch[k] = at(j + k);
      sum += sum_of_patch(patch, end);
    }
    return sum;
  }
  template <typename At>
  bool all(size_t count, const At& at) const {
    for (size_t i = 0; i < count; i++) {
      if (!at(i)) return false;
    }
    return true;
  }
  template <typename Act>
  Folding once(const Act& act) const {
    return act();
  }
  bool leads() const { return true; }
  float fresh(const float* from) const { return *from; }
  void prepare(float* from, size_t rows, size_t columns) const { add_rows(from, rows, columns); }
  float down(const float* from, size_t, size_t) const { return *from; }
  void sync() const {}
};

// ------------------------------------------------------------------------------ passes

// A thread takes a block of rows, or some neighbours. Arguments are copied: what is stored could
// else change them, for all that the compiler knows.

#define PYCOMM_INLINED __attribute__((always_inline))

/// Calls act(warp, value) for arrays of a dtype, and rows of so many columns; `floats`: so are all
/// others.
template <typename Act>
PYCOMM_HD void with_warp(DType dtype, bool floats, size_t columns, bool far, const Act& act) {
  if (dtype == DType::bfloat16) {
    act(Warp<false>{far}, codecs::cast::BFloat16());
  } else if (dtype == DType::float16) {
    act(Warp<false>{far}, codecs::cast::Float16());
  } else if (floats && columns % kLanes == 0) {
    act(Warp<true>{far}, stored::Float32());
  } else {
    act(Warp<false>{far}, stored::Float32());
  }
}

/// Calls act(first, end) for the pairs of rows of a block: the first-level cache has them between
/// two passes.
template <typename Act>
PYCOMM_HD void over_rows(const Rows& rows, size_t block, const Act& act) {
  const size_t end = std::min<size_t>(rows.count, (block + 1) * kBlock);
  for (size_t i = block * kBlock; i < end; i += 2) act(i, std::min(end, i + 2));
}

/// Encodes rows, one after the other: the momentum is then read as it lies in memory.
template <bool kMade, typename Warp, typename Array>
PYCOMM_HD void encode_rows(const Warp& warp, const CodingParams& args, const Array& values,
                           const Array& copy, size_t first, size_t end, float share) {
  const auto patches = static_cast<uint32_t>(args.rows.patches());
  for (size_t i = first; i < end; i++) {
    for (uint32_t patch = 0; patch < patches; patch++) {
      encode_patch<kMade>(warp, args, values, copy, i, patch, share, nullptr);
    }
  }
}

/// Adds up squares. Floats are encoded in the same pass, while the cache has them, as if all of the
/// gradient counted.
PYCOMM_SIMD void squares(const CodingParams& given, DType dtype, size_t block, bool far) {
  const auto args = given;
  const size_t real = args.looks ? args.rows.real() : 0;
  const bool floats = args.momentum_form == kFloat32 && args.form == kFloat32;
  with_warp(dtype, floats, args.rows.columns, far, [&](auto warp, auto value) PYCOMM_INLINED {
    using Values = Array<decltype(value)>;
    const Values values(args.values), copy(args.copy);
    const auto patches = static_cast<uint32_t>(args.rows.patches());
    over_rows(args.rows, block, [&](size_t first, size_t end) PYCOMM_INLINED {
      for (uint32_t patch = 0; first < real && patch < patches; patch++) {
        square_tile(warp, args, values, first, std::min(end, real), patch);
      }
      if constexpr (Values::is_float32()) {
        if (args.encodes) encode_rows<false>(warp, args, values, copy, first, end, 1.0f);
      }
    });
  });
}
/// Of floats, those are left of which not all counts.
PYCOMM_SIMD void encode(const CodingParams& given, DType dtype, size_t block, bool far) {
  const auto args = given;
  const float share = room_of(args).shares[args.rows.shard];
  if (dtype == DType::float32 && !(share < 1.0f)) return;
  const bool floats = args.momentum_form == kFloat32 && args.form == kFloat32;
  with_warp(dtype, floats, args.rows.columns, far, [&](auto warp, auto value) PYCOMM_INLINED {
    using Values = Array<decltype(value)>;
    const Values values(args.values), copy(args.copy);
    over_rows(args.rows, block, [&](size_t first, size_t end) PYCOMM_INLINED {
      constexpr bool kMade = Values::is_float32();
      encode_rows<kMade>(warp, args, values, copy, first, end, share);
    });
  });
}
PYCOMM_SIMD void send(const SentParams& given, DType dtype, size_t unit, bool far) {
  const auto args = given;
  const bool floats = args.form == kFloat32 && args.out_form == kFloat32;
  with_warp(dtype, floats, args.rows.columns, far, [&](auto warp, auto value) PYCOMM_INLINED {
    send_patch(warp, args, Array<decltype(value)>(args.values), unit);
  });
}
PYCOMM_SIMD void land(const LandParams& given, DType dtype, size_t unit, bool far) {
  const auto args = given;
  with_warp(dtype, true, args.rows.columns, far, [&](auto warp, auto value) PYCOMM_INLINED {
    land_patch(warp, args, Array<decltype(value)>(args.values), unit);
  });
}
void look(const LandParams& args, DType dtype) {
  Probe probe{};
  with_warp(dtype, true, args.rows.columns, false, [&](auto, auto value) PYCOMM_INLINED {
    for (size_t patch = 0; patch < kProbed / kPatch; patch++) {
      look_at_patch(Warp<false>{false}, args, Array<decltype(value)>(args.values), patch, probe);
    }
  });
  room_of(args).numbers->probe = probed(probe, args.unit);
}
PYCOMM_SIMD void move(const MoveParams& given, DType dtype, size_t unit, bool far) {
  const auto args = given;
  with_warp(dtype, true, args.rows.columns, far, [&](auto warp, auto value) PYCOMM_INLINED {
    using Values = Array<decltype(value)>;
    move_patch(warp, args, Values(args.values), Values(args.gradient), Values(args.momentum), unit);
  });
}

void finish_squares(const CodingParams& args, DType) {
  if (args.looks && args.rows.shard == 0) finish_squares(Alone(), args);
}
void finish_encode(const CodingParams& args, DType) {
  if (args.rows.shard == 0) finish_encode(Alone(), args);
}
void collect(const CollectParams& args, DType) { write_means(Alone(), args); }
void commit(const CommitParams& args, DType) { take_commit(Alone(), args); }

constexpr size_t kPart = size_t{1} << 16;  // values of a tensor that a thread takes in adamw()

PYCOMM_SIMD void adamw(const AdamWParams& given, DType, size_t part, bool) {
  const auto args = given;
  const size_t begin = part * kPart, end = std::min<size_t>(args.numel, begin + kPart);
  float* __restrict const x = args.values;
  const float* __restrict const g = args.gradient;
  float* __restrict const m = args.momentum, * __restrict const v = args.squares;
  for (size_t i = begin; i < end; i++) step_value(x[i], g[i], m[i], v[i], args.by);
}

/// Calls act(item) for each item below `items`, which together go over `values`; few values are
/// for the caller's thread alone. No result may depend on which thread has taken an item. Threads
/// are made anew: passes are called too rarely to keep some.
template <typename Act>
void spread(size_t items, size_t values, int threads, const Act& act) {
  constexpr size_t kPerThread = size_t{1} << 18;  // values that are worth a thread
  const size_t worth = std::max<size_t>(1, values / kPerThread);
  const size_t count = std::min({static_cast<size_t>(std::max(1, threads)), worth, items});
  if (count <= 1) {
    for (size_t i = 0; i < items; i++) act(i);
    return;
  }
  std::atomic<size_t> next{0};
  const auto work = [&] {
    const DefaultArithmetic arithmetic;
    for (size_t i; (i = next.fetch_add(1)) < items;) act(i);
  };
  std::vector<std::thread> others;
  others.reserve(count - 1);
  try {
    while (others.size() < count - 1) others.emplace_back(work);
  } catch (const std::system_error&) {  // there are no more threads: those that there are do it
  }
  work();
  for (std::thread& other : others) other.join();
}

/// A pass: its kernel on a device, by its name; and what the host does for each unit of a shard,
/// and then for each shard. Null: nothing.
template <typename Params>
struct Pass {
  const char* kernel;
  bool typed;  ///< there is a kernel for each dtype
  void (*take)(const Params&, DType, size_t unit, bool far);
  void (*finish)(const Params&, DType);
};
constexpr Pass<CodingParams> kSquares{"squares", true, squares, finish_squares};
constexpr Pass<CodingParams> kEncode{"encode", true, encode, finish_encode};
constexpr Pass<SentParams> kSent{"sent", true, send, nullptr};
constexpr Pass<LandParams> kLand{"land", true, land, look};
constexpr Pass<MoveParams> kMove{"move", true, move, nullptr};
constexpr Pass<CollectParams> kCollect{"collect", false, nullptr, collect};
constexpr Pass<CommitParams> kCommit{"commit", false, nullptr, commit};
constexpr Pass<AdamWParams> kAdamW{"adamw", false, adamw, nullptr};

/// A pass over some matrices: loops of threads, or one launch.
template <typename Params>
class Run {
 public:
  explicit Run(const Pass<Params>& pass, DType dtype = DType::float32)
      : pass_(pass), dtype_(dtype) {
    if (dtype == DType::float32 || dtype == DType::bfloat16 || dtype == DType::float16) return;
    throw Error("moments: values are floats of 16 or 32 bits");
  }

  /// Adds a shard of so many values, which so many warps of a device take, or units of the host.
  void add(const Params& params, size_t warps, size_t units = 0, size_t values = 0) {
    shards_.push_back({params, warps, units});
    values_ += values;
  }

  /// The same of a pass that takes patches of neighbours.
  void add_neighbours(const Params& params) {
    constexpr size_t kUnit = Warp<true>::kNeighbours;
    const size_t values = params.rows.numel();
    add(params, (values + kPatch - 1) / kPatch, (values + kUnit - 1) / kUnit, values);
  }

  void start(const Where& where, const float* swapped = nullptr) const {
    where.on_device() ? launch(where.stream, swapped) : loop(where.threads);
  }

 private:
  struct Shard {
    Params params;
    size_t warps, units;
  };

  void launch(const Stream& stream, const float* swapped) const {
    std::string kernel = std::string("pycomm::moments::") + pass_.kernel;
    if (pass_.typed) {
      kernel = codecs::kernel_name(kernel, std::string(codecs::cast::type_name(dtype_)));
    }
    codecs::Batching batching(swapped);
    for (const Shard& shard : shards_) {
      batching.row();
      codecs::launch("moments", kernel, shard.params, shard.warps, 1, stream);
    }
    batching.start(stream);
  }

  void loop(int threads) const {
    const bool far = values_ >= size_t{1} << 21;  // caches do not hold the pass
    std::vector<std::pair<size_t, size_t>> places;
    for (size_t i = 0; pass_.take && i < shards_.size(); i++) {
      for (size_t unit = 0; unit < shards_[i].units; unit++) places.emplace_back(i, unit);
    }
    spread(places.size(), values_, threads, [&](size_t n) {
      const auto& [i, unit] = places[n];
      pass_.take(shards_[i].params, dtype_, unit, far);
#ifdef __SSE2__
      if (far) _mm_sfence();
#endif
    });
    if (!pass_.finish) return;
    spread(shards_.size(), values_, threads,
           [&](size_t i) { pass_.finish(shards_[i].params, dtype_); });
  }

  const Pass<Params>& pass_;
  const DType dtype_;
  size_t values_ = 0;
  std::vector<Shard> shards_;
};

/// Returns the arguments that all passes over a shard have.
template <typename Params>
Params params_of(const Matrix& m) {
  Params params{};
  params.room = m.room;
  params.rows = m.rows;
  return params;
}

/// Returns where a matrix's values are among those of a bucket; null: nowhere.
uint8_t* place(const void* values, DType dtype, const Matrix& m) {
  auto* at = static_cast<uint8_t*>(const_cast<void*>(values));
  return at == nullptr ? nullptr : at + m.offset * size_of(dtype);
}

}  // namespace

void Moments::code(const Bucket& bucket, const std::vector<Turn>& turns, bool encodes,
                   const Where& where) const {
  Run squares(kSquares, bucket.dtype), encode(kEncode, bucket.dtype);
  float* scratch = bucket.scratch;
  for (size_t i = 0; i < matrices_.size(); i++) {
    const Matrix& m = matrices_[i];
    const Turn& turn = turns.at(i);
    auto params = params_of<CodingParams>(m);
    params.values = place(bucket.values, bucket.dtype, m);
    params.bounds = m.row;
    params.scratch = scratch - m.rows.shard * m.rows.scratch_floats();
    scratch += m.rows.scratch_floats();
    params.left = scratch - 2 * m.rows.cells();
    params.signs = turn.signs;
    params.first = turn.first;
    params.stride = turn.stride;
    params.beta1 = turn.momentum;
    params.unit = bucket.unit;
    params.unit_squared = static_cast<float>(bucket.unit * bucket.unit);
    params.bound = bucket.bound;
    params.ranks = bucket.ranks;
    params.momentum = turn.own < 0 ? m.momentum.at : m.own.at[turn.own];
    params.momentum_form = turn.own < 0 ? m.momentum.form : m.own.form;
    if (turn.signs != nullptr) {
      params.stored = m.residual.at[turn.residual];
      params.other_side = m.residual.at[1 - turn.residual];
    }
    params.form = m.residual.form;
    params.copy = place(bucket.copy, bucket.dtype, m);
    params.by_kept = 1.0f / turn.kept;
    params.divides = bucket.divides;
    params.looks = turn.is_new != encodes;
    params.encodes = encodes && !where.on_device() && bucket.dtype == DType::float32;
    const size_t blocks = m.rows.blocks(), patches = m.rows.patches(), values = m.rows.numel();
    if (params.encodes) set_step(*room_of(params).numbers, turn.momentum, bucket.unit);
    if (params.looks || params.encodes) squares.add(params, blocks * patches, blocks, values);
    const size_t groups = (m.rows.count + kEncodeRows - 1) / kEncodeRows;
    if (encodes) encode.add(params, groups * patches, blocks, values);
  }
  squares.start(where);
  encode.start(where, bucket.swapped);
}

void Moments::sent(const void* values, DType dtype, const std::vector<Sending>& sendings,
                   bool divides, const float* swapped, const Where& where) const {
  Run run(kSent, dtype);
  for (size_t i = 0; i < matrices_.size(); i++) {
    const Matrix& m = matrices_[i];
    const Sending& by = sendings.at(i);
    auto params = params_of<SentParams>(m);
    params.values = place(values, dtype, m);
    params.before = by.before == nullptr ? m.residual.at[by.residual] : by.before;
    params.after = m.residual.at[1 - by.residual];
    params.out = m.own.at[by.own];
    params.form = static_cast<uint8_t>(m.residual.form);
    params.out_form = static_cast<uint8_t>(m.own.form);
    params.divides = divides ? 1 : 0;
    params.kept = by.kept;
    run.add_neighbours(params);
  }
  run.start(where, swapped);
}

void Moments::land(void* values, DType dtype, double unit, bool divides, const Where& where) const {
  Run run(kLand, dtype);
  for (const Matrix& m : matrices_) {
    auto params = params_of<LandParams>(m);
    params.values = place(values, dtype, m);
    params.unit = static_cast<float>(unit);
    params.divides = divides ? 1 : 0;
    run.add_neighbours(params);
  }
  run.start(where);
}

void Moments::collect(float* sums, const Where& where) const {
  Run run(kCollect);
  for (const Matrix& m : matrices_) run.add({{}, m.room, sums + m.sums_at, m.rows}, 1);
  run.start(where);
}

void Moments::commit(const float* sums, const std::vector<Commit>& how, uint32_t ranks,
                     const Where& where) const {
  Run run(kCommit);
  for (size_t i = 0; i < matrices_.size(); i++) {
    const Matrix& m = matrices_[i];
    const Commit& by = how.at(i);
    const float* const own = sums == nullptr ? nullptr : sums + m.sums_at;
    run.add({{},
             own,
             m.room,
             m.row,
             m.column,
             m.heard,
             m.rows.all,
             m.rows.columns,
             ranks,
             by.use,
             by.beta2,
             by.eps},
            1);
  }
  run.start(where);
}

void Moments::move(const std::vector<Step>& steps, DType dtype, const Where& where) const {
  Run run(kMove, dtype);
  for (const Step& step : steps) {
    const Matrix& m = matrices_.at(step.matrix);
    auto params = params_of<MoveParams>(m);
    params.rows.count = m.rows.real();
    params.values = step.values;
    params.gradient = step.gradient;
    params.momentum = m.momentum.at;
    params.lr = static_cast<float>(step.lr);
    params.keep = static_cast<float>(step.keep);
    params.limit = static_cast<float>(step.limit);
    params.kept = step.kept;
    params.divides = step.divides ? 1 : 0;
    params.probed = step.probed ? 1 : 0;
    run.add_neighbours(params);
  }
  run.start(where);
}

void step_by_adamw(const std::vector<Tensor>& tensors, const AdamW& settings, const Where& where) {
  Run run(kAdamW);
  for (const Tensor& tensor : tensors) {
    const double steps = static_cast<double>(*tensor.steps += 1);
    AdamWParams params{
        {}, tensor.values, tensor.gradient, tensor.momentum, tensor.squares, tensor.numel, {}, 0};
    params.by.rest1 = static_cast<float>(1 - settings.beta1);
    params.by.beta2 = static_cast<float>(settings.beta2);
    params.by.rest2 = static_cast<float>(1 - settings.beta2);
    params.by.keep = static_cast<float>(1 - settings.lr * settings.weight_decay);
    params.by.lr = static_cast<float>(settings.lr / (1 - std::pow(settings.beta1, steps)));
    params.by.root = static_cast<float>(std::sqrt(1 - std::pow(settings.beta2, steps)));
    params.by.eps = static_cast<float>(settings.eps);
    run.add(params, (tensor.numel + kPatch - 1) / kPatch, (tensor.numel + kPart - 1) / kPart,
            tensor.numel);
  }
  run.start(where);
}

}  // namespace pycomm::moments
