// Kernel of collectives that reduce: all_reduce, reduce and reduce_scatter. Sums are made as on the
// CPU (core/reduce.h): each element by one owner, in rank order.
#pragma once
#include "collectives/device/fold.h"

namespace pycomm::device {

/// Operation of one block: its share of the elements, in rounds.
template <typename Machine, typename Type, typename Ops>
class DeviceReduction {
 public:
  PYCOMM_KERNEL DeviceReduction(const Machine& m, const ReduceCall& args)
      : m_(m),
        args_(args),
        barrier_(m, args.call),
        n_(args.call.peers.ranks),
        self_(args.call.peers.rank) {}

  PYCOMM_KERNEL void run() {
    if (barrier_.start() && rounds()) return barrier_.end();
    const Share part = ours(args_.algo == ReduceAlgo::scatter ? self_ : 0);
    if (wanted()) spoil(m_, args_.out + part.begin, part.size());
  }

 private:
  /// Folds what all ranks share.
  template <typename Input>
  PYCOMM_KERNEL void fold(const Input& input, uint8_t* to, size_t bytes) const {
    using Scalar = typename Type::Scalar;
    Ops::visit(args_.op, [&](auto op) {
      const BlockReducer<Type, decltype(op)> reducer{Scalar{1}, static_cast<Scalar>(args_.divisor),
                                                     args_.op == ReduceOp::avg};
      reducer.fold(m_, input, n_, to, bytes);
    });
  }
  /// Shares our contribution: in a premul_sum our data times our own factor, as peers know only
  /// theirs.
  PYCOMM_KERNEL void show(uint8_t* to, const uint8_t* from, size_t bytes) const {
    if constexpr (Ops::kScales) {
      if (args_.op == ReduceOp::premul_sum) {
        using Scalar = typename Type::Scalar;
        const BlockReducer<Type, ScaledSum> reducer{static_cast<Scalar>(args_.factor), Scalar{1},
                                                    false};
        return reducer.fold(m_, [&](int) { return from; }, 1, to, bytes);
      }
    }
    copy(m_, to, from, bytes);
  }
  /// True if this rank gets the result.
  PYCOMM_KERNEL bool wanted() const { return args_.root < 0 || args_.root == self_; }
  PYCOMM_KERNEL Share ours(int run) const {
    return share(args_.in.bytes[run], m_.blocks(), m_.block());
  }

  /// Every rank shares its data; then one_shot: every rank folds all,
  /// two_shot: the owner of a chunk folds it and shares the result, scatter: every rank folds its
  /// own part.
  PYCOMM_KERNEL bool rounds() {
    const bool scatter = args_.algo == ReduceAlgo::scatter;
    const bool two_shot = args_.algo == ReduceAlgo::two_shot;
    const int runs = scatter ? n_ : 1, own_run = scatter ? self_ : 0;
    const size_t room = args_.call.slot_bytes / runs / 16 * 16;
    size_t longest = 0;
    for (int r = 0; r < runs; r++) longest = ours(r).size() > longest ? ours(r).size() : longest;

    for (size_t done = 0; done < longest; done += room) {
      for (int r = 0; r < runs; r++) {
        const Share part = part_of(ours(r), done, room);
        show(barrier_.writes(self_) + r * room, args_.in.data[r] + part.begin, part.size());
      }
      if (!barrier_.arrive_wait()) return false;

      const Share part = part_of(ours(own_run), done, room);
      const Share chunk = two_shot ? share(part.size(), n_, self_) : Share{0, part.size()};
      const size_t offset = own_run * room + chunk.begin;
      uint8_t* const to = two_shot ? barrier_.writes(self_) + chunk.begin : args_.out + part.begin;
      if (two_shot || wanted()) {
        fold([&](int j) { return barrier_.reads(j) + offset; }, to, chunk.size());
      }
      if (!two_shot) continue;

      if (!barrier_.arrive_wait()) return false;
      for (int i = 0; wanted() && i < n_; i++) {
        const int r = (self_ + i) % n_;  // starts with another rank on each
        const Share result = share(part.size(), n_, r);
        copy(m_, args_.out + part.begin + result.begin, barrier_.reads(r) + result.begin,
             result.size());
      }
    }
    return true;
  }

  const Machine& m_;
  const ReduceCall& args_;
  DeviceBarrier<Machine> barrier_;
  const int n_, self_;
};

// ------------------------------------------------------------------------ what each type has

template <typename Type, typename Ops>
struct ReduceKernel {
  template <typename Machine>
  PYCOMM_KERNEL static void run(const Machine& m, const ReduceCall& args) {
    DeviceReduction<Machine, Type, Ops>(m, args).run();
  }
};

template <typename Type>
using FloatKernel = ReduceKernel<Type, NumberOps<ScaledSum, true>>;
template <typename T>
using IntegerKernel = ReduceKernel<kernels::Integer<T>, NumberOps<kernels::Avg, false>>;
/// Complex reductions other than products are reductions of the parts.
template <typename T>
using ComplexProduct = ReduceKernel<kernels::Complex<T>, ProductOnly>;
using BitsKernel = ReduceKernel<kernels::Integer<uint8_t>, BitOps>;

// Each calls visit(Kernel{}) with the kernel of a type, for types and ops of lower() (reduce.h).

template <typename Visit>
void visit_float(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::float32:
      return visit(FloatKernel<kernels::Float<float>>{});
    case DType::float64:
      return visit(FloatKernel<kernels::Float<double>>{});
    case DType::complex64:
      return visit(ComplexProduct<float>{});
    default:
      return visit(ComplexProduct<double>{});
  }
}

template <typename Visit>
void visit_small_float(DType dtype, const Visit& visit) {
  using kernels::StoredFloat;
  switch (dtype) {
    case DType::float16:
      return visit(FloatKernel<StoredFloat<Float16, uint16_t>>{});
    case DType::bfloat16:
      return visit(FloatKernel<StoredFloat<BFloat16, uint16_t>>{});
    case DType::float8_e4m3:
      return visit(FloatKernel<StoredFloat<Float8E4M3, uint8_t>>{});
    default:
      return visit(FloatKernel<StoredFloat<Float8E5M2, uint8_t>>{});
  }
}

template <typename Visit>
void visit_integer(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::int8:
      return visit(IntegerKernel<int8_t>{});
    case DType::int16:
      return visit(IntegerKernel<int16_t>{});
    case DType::int32:
      return visit(IntegerKernel<int32_t>{});
    case DType::int64:
      return visit(IntegerKernel<int64_t>{});
    case DType::uint8:
      return visit(IntegerKernel<uint8_t>{});
    case DType::uint16:
      return visit(IntegerKernel<uint16_t>{});
    case DType::uint32:
      return visit(IntegerKernel<uint32_t>{});
    default:
      return visit(IntegerKernel<uint64_t>{});
  }
}

}  // namespace pycomm::device
