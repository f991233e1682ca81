// Coded operations whose payloads Python moves: pycomm.reduction.two_shot owns all memory, and only
// addresses come here.
#include "collectives/coded/coded.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "binding/core/arguments.h"
#include "binding/core/gil.h"
#include "binding/core/module.h"
#include "collectives/coded/two_shot.h"
#include "core/arithmetic.h"

namespace py = pybind11;

namespace pycomm {
namespace {

using coded::PieceRuns;
using coded::Shot;
/// An address or offset, and a number of bytes or elements.
using Place = std::pair<size_t, size_t>;
/// Runs: piece, offset in it, elements.
using Runs = std::vector<std::array<size_t, 3>>;
/// Received payloads: address and bytes of their memory, and the place of each rank's there.
using Came = std::tuple<uintptr_t, size_t, std::vector<Place>>;
/// Sends payloads that begin at an offset of the memory, of these bytes for each rank or for all.
using Move = std::function<Came(Shot, size_t, const std::vector<size_t>&)>;
using Launcher = std::function<void(const std::vector<codecs::Launch>&)>;

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Where our payloads begin in the memory of an operation: contributions, our result, what we show.
struct Places {
  explicit Places(const coded::Plan& plan) {
    result = plan.scatters ? aligned(plan.owned.bytes()) : 0;
    shown = result + (plan.gathers ? aligned(plan.owned.most_bytes()) : 0);
    end = shown + plan.shown.bytes();
  }
  size_t result, shown, end;
};

/// The exchange of one operation by the caller's process group.
class CallersGroup final : public coded::Exchange {
 public:
  /// `room_behind`: bytes that must follow received payloads. `launch` starts the kernels that the
  /// core does not start; null: it does.
  CallersGroup(int rank, int size, const coded::Plan& plan, size_t room_behind, uint8_t* memory,
               const Move& move, const Launcher& launch)
      : Exchange(rank, size),
        plan_(plan),
        places_(plan),
        room_behind_(room_behind),
        memory_(memory),
        move_(move),
        launch_(launch),
        contributed_(static_cast<size_t>(size), 0) {
    if (launch_) recording_.emplace();
  }

  uint8_t* room(Shot shot, int owner, size_t s) override {
    if (shot == Shot::contribution) return memory_ + plan_.owned.at(owner, s).payload;
    return memory_ + (shot == Shot::result ? places_.result : places_.shown);
  }
  void put(Shot shot, int owner, size_t, size_t bytes) override {
    if (shot == Shot::contribution) contributed_[static_cast<size_t>(owner)] = bytes;
    if (shot == Shot::result) result_ = bytes;
    if (shot == Shot::shown) shown_ = bytes;
  }
  void flush(Shot shot) override {
    if (shot == Shot::contribution) {
      if (plan_.scatters && !plan_.owned.empty()) scatter();
      return;
    }
    if (plan_.gathers && !plan_.owned.empty()) move(Shot::result, places_.result, {result_});
    if (!plan_.shown.empty()) move(Shot::shown, places_.shown, {shown_});
    has_all_ = true;
  }
  bool has(Shot shot, int, size_t) override { return shot == Shot::contribution || has_all_; }
  Span<const uint8_t> get(Shot shot, int from, size_t) override {
    return came_[static_cast<size_t>(shot)][static_cast<size_t>(from)];
  }

  /// Starts the kernels that were recorded.
  void launch() {
    if (!recording_) return;
    const std::vector<codecs::Launch> launches = std::move(recording_->launches);
    recording_.reset();
    if (!launches.empty()) launch_(launches);
  }

 private:
  /// Moves the contributions, each behind the one before it.
  void scatter() {
    size_t end = 0;
    for (int owner = 0; owner < size(); owner++) {
      const size_t bytes = contributed_[static_cast<size_t>(owner)];
      if (bytes == 0) continue;
      const size_t begin = plan_.owned.at(owner, 0).payload;
      if (begin != end) std::memmove(memory_ + end, memory_ + begin, bytes);
      end += bytes;
    }
    move(Shot::contribution, 0, contributed_);
  }

  void move(Shot shot, size_t begin, const std::vector<size_t>& sizes) {
    launch();
    const auto [address, capacity, places] = move_(shot, begin, sizes);
    if (launch_) recording_.emplace();
    if (places.size() != static_cast<size_t>(size())) {
      throw Error("got payloads of " + std::to_string(places.size()) + " ranks; give those of " +
                  std::to_string(size()));
    }
    const bool fits = room_behind_ <= capacity;
    const size_t behind = fits ? capacity - room_behind_ : 0;
    for (const auto& [offset, bytes_of] : places) {
      if (!fits || offset > behind || bytes_of > behind - offset || offset % 4 != 0) {
        throw Error("a payload must begin at a multiple of 4, with " +
                    std::to_string(room_behind_) + " more bytes of memory behind it");
      }
      came_[static_cast<size_t>(shot)].emplace_back(bytes(address) + offset, bytes_of);
    }
  }

  const coded::Plan& plan_;
  const Places places_;
  const size_t room_behind_;
  uint8_t* const memory_;
  const Move& move_;
  const Launcher& launch_;
  std::optional<codecs::Recording> recording_;
  std::vector<size_t> contributed_;  ///< bytes for each owner
  size_t result_ = 0, shown_ = 0;
  std::array<std::vector<Span<const uint8_t>>, 3> came_;  ///< by shot and rank
  bool has_all_ = false;
};

/// The pieces of a bucket, and the chunks in which they travel.
class CodedBucket final : public Pieces {
 public:
  /// `rank` is ours among `ranks` that encode the same values.
  CodedBucket(int rank, int ranks, size_t rows) : Pieces(rows), rank_(rank), ranks_(ranks) {
    if (rank < 0 || rank >= ranks) {
      throw Error("rank " + std::to_string(rank) + " is not in a group of " +
                  std::to_string(ranks) + " ranks");
    }
  }

  /// Says what is exchanged: a chunk of runs for each owner, or all pieces of its own row, whose
  /// residuals have this number; and what has no owner.
  void plan(const std::vector<Runs>& owned, const Runs& shown, const std::vector<size_t>& rows,
            bool scatters, bool gathers) {
    for (const size_t owners : {owned.size(), rows.size()}) {
      if (owners == 0 || owners == static_cast<size_t>(ranks_)) continue;
      throw Error("got " + std::to_string(owners) + " chunks or rows for " +
                  std::to_string(ranks_) + " owners");
    }
    if (!owned.empty() && !rows.empty()) throw Error("give chunks or rows, not both");
    for (const size_t row : rows) {
      if (row >= Pieces::rows()) {
        throw Error("there is no row " + std::to_string(row) + " among residuals of " +
                    std::to_string(Pieces::rows()) + " rows");
      }
    }
    std::vector<PieceRuns> chunks;
    for (const Runs& runs : owned) chunks.push_back(checked(runs));
    plan_.owned = !rows.empty() ? coded::BucketLayout::of_rows(pieces(), rows, row())
                                : coded::BucketLayout::of_chunks(pieces(), chunks);
    plan_.shown = coded::BucketLayout::of_chunks(pieces(), {checked(shown)});
    plan_.scatters = scatters;
    plan_.gathers = gathers;
    by_rows_ = !rows.empty();
    room_behind_ = 0;
    for (const coded::BucketLayout* layout : {&plan_.owned, &plan_.shown}) {
      for (const coded::Segment& segment : layout->segments()) {
        for (const coded::PieceRun& run : layout->runs(segment)) {
          const Codec& codec = *pieces()[run.piece].codec;
          if (codec.variable())
            room_behind_ = std::max(room_behind_, codec.encoded_bytes(run.numel));
        }
      }
    }
  }

  /// Bytes of memory that run() needs, and that must follow received payloads.
  size_t memory_bytes() const { return Places(plan_).end; }
  size_t room_behind() const { return room_behind_; }
  /// Bytes of scratch memory that run() needs on a GPU.
  size_t scratch_bytes(DType dtype) const {
    return coded::Coder::scratch_bytes(args(Op::all_reduce, 1, 0, dtype), plan_);
  }

  /// Runs the operation on values at addresses, of so many elements. `sides` has one entry for each
  /// piece. On a device there is a stream with its scratch memory, and `swapped` may be 0.
  void run(Place input, Place output, DType dtype, const std::vector<Sides>& sides, Place memory,
           const Move& move, const Launcher& launch, uint64_t seed, uint32_t step, int divisor,
           uintptr_t found_inf, std::optional<uintptr_t> stream, Place scratch, uintptr_t swapped) {
    if (divisor < 1) throw Error("divisor is " + std::to_string(divisor) + "; want 1 or more");
    if (memory.second < memory_bytes()) {
      throw Error("the memory has " + std::to_string(memory.second) + " bytes, but payloads need " +
                  std::to_string(memory_bytes()) + "; make it larger");
    }
    const size_t rows_in = by_rows_ ? static_cast<size_t>(ranks_) : 1;
    check_values(input, rows_in);
    check_values(output, 1);
    set_sides(sides);
    const CodedArgs args = this->args(by_rows_ ? Op::reduce_scatter : Op::all_reduce, ranks_,
                                      input.first, dtype, divisor != 1, seed, step);
    coded::check("coded bucket", args, rows_in);
    coded::CoderOptions options;
    options.rank = rank_;
    options.divisor = divisor;
    options.found_inf = floats(found_inf);
    if (stream) {
      options.stream = {Device::cuda, pointer(*stream), {bytes(scratch.first), scratch.second}};
      options.swapped = floats(swapped);
    }
    const GilReleased release;
    const DefaultArithmetic arithmetic;
    feedback::Scratch passes;
    coded::Coder coder(args, pointer(output.first), passes, options);
    CallersGroup group(rank_, ranks_, plan_, room_behind_, bytes(memory.first), move, launch);
    coded::TwoShot(group, coder, plan_).run();
    group.launch();
  }

 private:
  PieceRuns checked(const Runs& given) const {
    PieceRuns runs;
    for (const auto& [piece, offset, numel] : given) runs.push_back({piece, offset, numel});
    coded::check_runs(pieces(), {runs.data(), runs.size()});
    return runs;
  }

  void check_values(const Place& values, size_t rows) const {
    if (numel() > kLargestBuffer / sizeof(float) / rows) {
      throw Error("no memory holds " + std::to_string(rows) + " rows of " +
                  std::to_string(numel()) + " elements");
    }
    if (values.second != rows * numel()) {
      throw Error("a tensor has " + std::to_string(values.second) + " values, but the bucket has " +
                  std::to_string(numel()) + " in each of " + std::to_string(rows) + " rows");
    }
  }

  /// A segment of so many values is a whole row.
  size_t row() const { return std::max<size_t>(1, numel()); }

  const int rank_, ranks_;
  size_t room_behind_ = 0;
  coded::Plan plan_;
  bool by_rows_ = false;
};

}  // namespace

void bind_coded(py::module_& m) {
  using Addresses = Pieces::Addresses;
  py::class_<Pieces>(m, "Pieces")
      .def(py::init<>())
      .def("add", &Pieces::add, py::arg("numel"), py::arg("codec"), py::kw_only(),
           py::arg("tensor") = 0, py::arg("kind") = feedback::Kind::residual,
           py::arg("storage") = feedback::Storage::float32, py::arg("decay") = 0.0,
           py::arg("worker") = Addresses{}, py::arg("owner") = Addresses{},
           py::arg("momentum") = Addresses{}, py::arg("worker_spans") = feedback::kAllValues,
           py::arg("owner_spans") = feedback::kAllValues)
      .def_property_readonly("numel", &Pieces::numel)
      .def("__len__", &Pieces::size);
  py::enum_<Shot>(m, "Shot")
      .value("contribution", Shot::contribution)
      .value("shown", Shot::shown)
      .value("result", Shot::result);
  py::class_<CodedBucket, Pieces>(m, "CodedBucket")
      .def(py::init<int, int, size_t>(), py::arg("rank"), py::arg("ranks"), py::arg("rows") = 1)
      .def("plan", &CodedBucket::plan, py::arg("owned"), py::arg("shown"), py::kw_only(),
           py::arg("rows") = std::vector<size_t>(), py::arg("scatters") = true,
           py::arg("gathers") = true)
      .def_property_readonly("memory_bytes", &CodedBucket::memory_bytes)
      .def_property_readonly("room_behind", &CodedBucket::room_behind)
      .def("scratch_bytes", &CodedBucket::scratch_bytes, py::arg("dtype"))
      .def("run", &CodedBucket::run, py::arg("input"), py::arg("output"), py::arg("dtype"),
           py::arg("sides"), py::arg("memory"), py::arg("move"), py::arg("launch") = py::none(),
           py::kw_only(), py::arg("seed"), py::arg("step"), py::arg("divisor"),
           py::arg("found_inf"), py::arg("stream") = py::none(), py::arg("scratch") = Place(),
           py::arg("swapped") = 0);
}

}  // namespace pycomm
