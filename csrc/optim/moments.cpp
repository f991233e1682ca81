#include "optim/moments.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "codecs/base/feedback.h"
#include "codecs/base/launch.h"
#include "codecs/base/loops.h"
#include "codecs/cast.h"
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
PYCOMM_HD Lanes operator/(const Lanes& x, const Lanes& y) {
  return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d};
}
PYCOMM_HD void clamp(Eight& x, float limit) {
  const Eight most = {limit, limit, limit, limit, limit, limit, limit, limit};
  x = x > most ? most : x;
  x = x < -most ? -most : x;
}

/// Returns x in the lanes before one, and y in the others.
PYCOMM_HD Lanes before(int lane, const Lanes& x, const Lanes& y) {
  using Eights = int __attribute__((vector_size(32)));
  const Eights from{lane, lane, lane, lane, lane, lane, lane, lane};
  constexpr Eights a{0, 1, 2, 3, 4, 5, 6, 7};
  const Eights b = a + 8, c = a + 16, d = a + 24;
  return {a < from ? x.a : y.a, b < from ? x.b : y.b, c < from ? x.c : y.c, d < from ? x.d : y.d};
}

// Of values that are fewer than lanes, these loops become loads and stores with a mask. A call of
// memcpy would store all vectors.

/// Decodes values; `beyond` is in the lanes behind them.
template <typename Form>
PYCOMM_HD Lanes decoded(const void* from, int count, float beyond = 0.0f) {
  const auto* const codes = static_cast<const typename Form::Code*>(from);
  if constexpr (sizeof *codes == sizeof(float)) {
    if (count == kApart) return Lanes::at(codes);
  }
  float room[kLanes];
  if (count == kApart) {
    for (int l = 0; l < kApart; l++) room[l] = Form::decode(codes[l]);
  } else {
    for (int l = 0; l < kApart; l++) room[l] = l < count ? Form::decode(codes[l]) : beyond;
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

/// The places of neighbours in their matrix. `kWhole`: lanes are all in one row.
template <bool kWhole>
struct Place {
  const Rows& rows;
  size_t row, column;      // of the first
  float edge[2 * kLanes];  ///< factors of the last kLanes - 1 columns, and of those that follow

  PYCOMM_HD Place(const Rows& rows, size_t i, const float* by_column)
      : rows(rows), row(i / rows.columns), column(i % rows.columns) {
    if (kWhole || by_column == nullptr) return;
    size_t j = (kLanes * rows.columns - kLanes + 1) % rows.columns;
    for (float& each : edge) {
      each = by_column[j];
      if (++j == rows.columns) j = 0;
    }
  }
  PYCOMM_HD void next() {
    for (column += kLanes; column >= rows.columns; row++) column -= rows.columns;
  }
  PYCOMM_HD bool in_one_row() const { return kWhole || column + kLanes <= rows.columns; }
  PYCOMM_HD Lanes by_row(const float* factors) const {
    Lanes by = factor_of(factors, rows, row);
    if (in_one_row()) return by;
    size_t i = row + 1;
    for (size_t end = rows.columns - column; end < kLanes; end += rows.columns) {
      by = before(static_cast<int>(end), by, factor_of(factors, rows, i++));
    }
    return by;
  }
  PYCOMM_HD Lanes by_column(const float* factors) const {
    return Lanes::at(in_one_row() ? factors + column : edge + kLanes - 1 + column - rows.columns);
  }
};

/// `kPlain`: all arrays are of floats, and rows of whole lanes, as in most passes, which take
/// half of the time where nothing decides about that.
template <bool kPlain>
struct Warp {
  using Lanes = moments::Lanes;
  static constexpr bool kGoesOn = true;  ///< squares may take the rows of a block in parts
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
  PYCOMM_HD static Place<kPlain> place(const Rows& rows, size_t i, const float* by_column) {
    return {rows, i, by_column};
  }

  PYCOMM_HD static Lanes load(const float* from, size_t i, int left, int k, float beyond = 0.0f) {
    const int count = there(left, k);
    return count == 0 ? beyond : decoded<stored::Float32>(from + i + k * kLanes, count, beyond);
  }
  template <typename Value>
  PYCOMM_HD static Lanes load(const Array<Value>& from, size_t i, int left, int k) {
    return decoded<Value>(from.at + i + k * kLanes, there(left, k));
  }
  PYCOMM_HD static Lanes load(const void* from, uint32_t form, size_t i, int left, int k) {
    if (kPlain || form == kFloat32) return load(static_cast<const float*>(from), i, left, k);
    const int count = there(left, k);
    if (count == 0) return 0.0f;
    i += k * kLanes;
    const auto* const codes = static_cast<const uint16_t*>(from) + i;
    if (form == kFloat16) return decoded<codecs::cast::Float16>(codes, count);
    if (form != kInt8) return decoded<codecs::cast::BFloat16>(codes, count);
    const auto* const block =
        static_cast<const uint8_t*>(from) + i / stored::kBlock * stored::kBlockBytes;
    const int first = static_cast<int>(i % stored::kBlock);
    float room[2 * kLanes];
    codecs::load_block(block, room);
    if (first == 0 && count == kApart) return Lanes::at(room);
    if (first + count > kApart) codecs::load_block(block + stored::kBlockBytes, room + kLanes);
    return before(count, Lanes::at(room + first), 0.0f);
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
    if (form != kInt8) return moments::encode<stored::BFloat16>(x, count, to + i * 2);
    float room[kLanes];
    (count == kApart ? x : before(count, x, 0.0f)).to(room);
    codecs::store_block(room, to + i / stored::kBlock * stored::kBlockBytes);
  }

  PYCOMM_HD static Lanes clamped(Lanes x, float limit) {
    clamp(x.a, limit);
    clamp(x.b, limit);
    clamp(x.c, limit);
    clamp(x.d, limit);
    return x;
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

/// Calls act(first, end, patch) for all parts of rows of a block, up to `count`. They are in the
/// order of memory, which the caches do not hold, or as large as they can be.
template <typename Act>
PYCOMM_HD void over_tiles(const Rows& rows, size_t block, size_t count, bool far, const Act& act) {
  const auto patches = static_cast<uint32_t>(rows.patches());
  const size_t together = far && patches > 1 ? 2 : kBlock;
  const size_t end = std::min<size_t>(count, (block + 1) * kBlock);
  for (size_t i = block * kBlock; i < end; i += together) {
    for (uint32_t patch = 0; patch < patches; patch++) act(i, std::min(end, i + together), patch);
  }
}

PYCOMM_SIMD void square(const SquaresParams& given, DType dtype, size_t block, bool far) {
  const auto args = given;
  with_warp(dtype, true, args.rows.columns, far, [&](auto warp, auto value) PYCOMM_INLINED {
    const Array<decltype(value)> values(args.values);
    over_tiles(args.rows, block, args.rows.real(), far,
               [&](size_t first, size_t end, uint32_t patch)
                   PYCOMM_INLINED { square_tile(warp, args, values, first, end, patch); });
  });
}
PYCOMM_SIMD void encode(const EncodeParams& given, DType dtype, size_t block, bool far) {
  const auto args = given;
  const bool floats = args.momentum_form == kFloat32 && args.form == kFloat32;
  with_warp(dtype, floats, args.rows.columns, far, [&](auto warp, auto value) PYCOMM_INLINED {
    const Array<decltype(value)> values(args.values), copy(args.copy);
    over_tiles(args.rows, block, args.rows.count, far,
               [&](size_t first, size_t end, uint32_t patch)
                   PYCOMM_INLINED { encode_tile(warp, args, values, copy, first, end, patch); });
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

/// A pass: the name of its kernel on a device, and what the host does for each unit of a shard, and
/// then for each shard. Null: nothing.
template <typename Params>
struct Kernel {
  const char* name;
  void (*take)(const Params&, DType, size_t unit, bool far);
  void (*finish)(const Params&, DType);
};
constexpr Kernel<SquaresParams> kSquares{"squares", square, [](const SquaresParams& args, DType) {
                                           if (args.rows.shard == 0) finish_squares(Alone(), args);
                                         }};
constexpr Kernel<EncodeParams> kEncode{"encode", encode, [](const EncodeParams& args, DType) {
                                         if (args.rows.shard == 0) finish_encode(Alone(), args);
                                       }};
constexpr Kernel<SentParams> kSent{"sent", send, nullptr};
constexpr Kernel<LandParams> kLand{"land", land, look};
constexpr Kernel<MoveParams> kMove{"move", move, nullptr};
constexpr Kernel<CollectParams> kCollect{
    "collect", nullptr, [](const CollectParams& args, DType) { write_means(Alone(), args); }};
constexpr Kernel<CommitParams> kCommit{
    "commit", nullptr, [](const CommitParams& args, DType) { take_commit(Alone(), args); }};

/// A pass over some matrices: loops of threads, or one launch.
template <typename Params>
class Run {
 public:
  Run(const Kernel<Params>& kernel, DType dtype) : kernel_(kernel), dtype_(dtype) {
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
    where.stream.device == Device::cuda ? launch(where.stream, swapped) : loop(where.threads);
  }

 private:
  struct Shard {
    Params params;
    size_t warps, units;
  };

  void launch(const Stream& stream, const float* swapped) const {
    std::string kernel = std::string("pycomm::moments::") + kernel_.name;
    if (kernel_.take) {
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
    constexpr size_t kFar = size_t{1} << 21;  // values from which caches do not hold a pass
    std::vector<std::pair<size_t, size_t>> places;
    for (size_t i = 0; kernel_.take && i < shards_.size(); i++) {
      for (size_t unit = 0; unit < shards_[i].units; unit++) places.emplace_back(i, unit);
    }
    spread(places.size(), values_, threads, [&](size_t n) {
      const auto& [i, unit] = places[n];
      kernel_.take(shards_[i].params, dtype_, unit, values_ >= kFar);
#ifdef __SSE2__
      if (values_ >= kFar) _mm_sfence();
#endif
    });
    if (!kernel_.finish) return;
    spread(shards_.size(), values_, threads,
           [&](size_t i) { kernel_.finish(shards_[i].params, dtype_); });
  }

  const Kernel<Params>& kernel_;
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

void Moments::square(const Pass& pass, const std::vector<Turn>& turns, bool is_new,
                     const Where& where) const {
  Run run(kSquares, pass.dtype);
  float* scratch = pass.scratch;
  for (size_t i = 0; i < matrices_.size(); i++) {
    const Matrix& m = matrices_[i];
    const Turn& turn = turns.at(i);
    auto params = params_of<SquaresParams>(m);
    params.values = place(pass.values, pass.dtype, m);
    params.bounds = m.row;
    params.scratch = scratch - m.rows.shard * m.rows.scratch_floats();
    scratch += m.rows.scratch_floats();
    if (turn.is_new != is_new) continue;
    params.signs = turn.signs;
    params.first = turn.first;
    params.stride = turn.stride;
    params.momentum = turn.momentum;
    params.unit = pass.unit;
    params.unit_squared = static_cast<float>(pass.unit * pass.unit);
    params.bound = pass.bound;
    params.ranks = pass.ranks;
    run.add(params, m.rows.blocks() * m.rows.patches(), m.rows.blocks(), m.rows.numel());
  }
  run.start(where);
}

void Moments::squares(const Pass& pass, const std::vector<Turn>& turns, const Where& where) const {
  square(pass, turns, true, where);
}

void Moments::encode(const Pass& pass, const std::vector<Turn>& turns, const Where& where) const {
  square(pass, turns, false, where);
  Run run(kEncode, pass.dtype);
  float* scratch = pass.scratch;
  for (size_t i = 0; i < matrices_.size(); i++) {
    const Matrix& m = matrices_[i];
    const Turn& turn = turns.at(i);
    auto params = params_of<EncodeParams>(m);
    params.values = place(pass.values, pass.dtype, m);
    params.momentum = turn.own < 0 ? m.momentum.at : m.own.at[turn.own];
    params.momentum_form = turn.own < 0 ? m.momentum.form : m.own.form;
    if (turn.signs != nullptr) {
      params.stored = m.residual.at[turn.residual];
      params.other_side = m.residual.at[1 - turn.residual];
    }
    params.form = m.residual.form;
    params.copy = place(pass.copy, pass.dtype, m);
    scratch += m.rows.scratch_floats();
    params.left = scratch - 2 * m.rows.cells();
    params.by_kept = 1.0f / turn.kept;
    params.divides = pass.divides ? 1 : 0;
    const size_t groups = (m.rows.count + kEncodeRows - 1) / kEncodeRows;
    run.add(params, groups * m.rows.patches(), m.rows.blocks(), m.rows.numel());
  }
  run.start(where, pass.swapped);
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
  Run run(kCollect, DType::float32);
  for (const Matrix& m : matrices_) run.add({{}, m.room, sums + m.sums_at, m.rows}, 1);
  run.start(where);
}

void Moments::commit(const float* sums, const std::vector<Commit>& how, uint32_t ranks,
                     const Where& where) const {
  Run run(kCommit, DType::float32);
  for (size_t i = 0; i < matrices_.size(); i++) {
    const Matrix& m = matrices_[i];
    const Commit& by = how.at(i);
    CommitParams params{};
    params.sums = sums == nullptr ? nullptr : sums + m.sums_at;
    params.room = m.room;
    params.row = m.row;
    params.column = m.column;
    params.heard = m.heard;
    params.rows = m.rows.all;
    params.columns = m.rows.columns;
    params.ranks = ranks;
    params.use = by.use;
    params.beta2 = by.beta2;
    params.eps = by.eps;
    run.add(params, 1);
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

}  // namespace pycomm::moments
