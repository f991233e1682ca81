// Coded buckets whose payloads Python moves: pycomm.reduction.batched owns all memory, and only
// addresses come here.
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "binding/core/arguments.h"
#include "binding/core/gil.h"
#include "binding/core/module.h"
#include "collectives/coded/shots.h"
#include "core/arithmetic.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// The two sides of a feedback memory; zeros: there is none.
using Addresses = std::array<uintptr_t, 2>;
/// The side that a step reads, and the one that it writes.
using Sides = std::pair<size_t, size_t>;
/// Offset and bytes of the payloads of one rank or chunk, among all.
using Place = std::pair<size_t, size_t>;

constexpr size_t kScratchBytes = size_t{64} << 20;

/// Values at an address: this many rows of the bucket.
struct CodedValues {
  CodedValues(uintptr_t address, size_t numel, DType dtype, size_t rows)
      : address(address), numel(numel), dtype(dtype), rows(rows) {}
  uintptr_t address;
  size_t numel;
  DType dtype;
  size_t rows;
};

/// The received payloads, in memory of `capacity` bytes.
struct CodedPayloads {
  CodedPayloads(uintptr_t address, size_t capacity, std::vector<Place> places)
      : address(address), capacity(capacity), places(std::move(places)) {}
  uintptr_t address;
  size_t capacity;
  std::vector<Place> places;
};

/// The pieces of a bucket, with their feedback, and the chunks in which they travel. Built once,
/// used in every step, by one thread at a time.
class CodedBucket {
 public:
  /// `rows` is the number of rows of the workers' residuals.
  explicit CodedBucket(size_t rows) : rows_(rows) {
    if (rows == 0) throw Error("the bucket has 0 rows; give at least 1");
  }

  void add(size_t numel, const py::object& codec, uint32_t tensor, feedback::Kind kind,
           feedback::Storage storage, double decay, bool nesterov, Addresses worker,
           Addresses owner, Addresses momentum) {
    if (numel > kLargestBuffer / sizeof(float) / rows_ - numel_) {
      throw Error("no memory holds pieces of " + std::to_string(numel) + " elements and " +
                  std::to_string(numel_) + " before them");
    }
    Piece piece;
    piece.offset = numel_;
    piece.numel = numel;
    piece.codec = codec.cast<const Codec*>();
    piece.tensor = tensor;
    piece.worker.kind = kind;
    piece.worker.storage = piece.owner.storage = storage;
    piece.worker.decay = static_cast<float>(decay);
    piece.worker.nesterov = nesterov;
    memories_.push_back({worker, owner, momentum});
    set_memory(piece, memories_.back(), 0, 0);
    pieces_.push_back(piece);
    codecs_.push_back(codec);
    numel_ += numel;
  }

  /// Adds a chunk of runs (piece, offset in it, elements) in the order of their payloads.
  void add_chunk(const std::vector<std::array<size_t, 3>>& runs) {
    std::vector<coded::PieceRun> chunk;
    chunk.reserve(runs.size());
    for (const auto& [piece, offset, numel] : runs) chunk.push_back({piece, offset, numel});
    coded::check_runs(pieces(), {chunk.data(), chunk.size()});
    size_t most = 0;
    for (const coded::PieceRun& run : chunk) {
      const Codec& codec = *pieces_[run.piece].codec;
      const size_t bytes = codec.encoded_bytes(run.numel);
      most += bytes;
      if (codec.variable()) room_behind_ = std::max(room_behind_, bytes);
    }
    chunks_.push_back(std::move(chunk));
    most_.push_back(most);
  }

  /// The most bytes that the payloads of each chunk can have.
  const std::vector<size_t>& most() const { return most_; }
  /// Returns the bytes of memory that must follow received payloads.
  size_t room_behind() const { return room_behind_; }

  /// Begins an operation of `ranks` that encode the same values, whose sums are divided by
  /// `divisor`; there is one pair of sides for each piece. On a GPU, `stream` with its `scratch`
  /// memory (address, bytes) runs it, and `found_inf` and `swapped` are the addresses of floats
  /// (coded/shots.h).
  void begin(const std::vector<Sides>& sides, int rank, int ranks, uint64_t seed, uint32_t step,
             int divisor, std::optional<uintptr_t> stream, const Place& scratch,
             uintptr_t found_inf, uintptr_t swapped) {
    if (sides.size() != pieces_.size()) {
      throw Error("sides are given for " + std::to_string(sides.size()) +
                  " pieces, but the bucket has " + std::to_string(pieces_.size()));
    }
    if (divisor < 1) throw Error("divisor is " + std::to_string(divisor) + "; want 1 or more");
    if (rank < 0 || rank >= ranks) {
      throw Error("rank " + std::to_string(rank) + " is not in a group of " +
                  std::to_string(ranks) + " ranks");
    }
    for (size_t i = 0; i < sides.size(); i++) {
      const auto [old, fresh] = sides[i];
      if (old > 1 || fresh > 1) {
        throw Error("sides must be 0 or 1, got " + std::to_string(old) + " and " +
                    std::to_string(fresh));
      }
      set_memory(pieces_[i], memories_[i], old, fresh);
    }
    rank_ = rank;
    ranks_ = ranks;
    args_.pieces = pieces();
    args_.seed = seed;
    args_.step = step;
    args_.average = divisor != 1;
    divisor_ = divisor;
    stream_ = {};
    if (stream) {
      stream_ = {
          Device::cuda, reinterpret_cast<void*>(*stream), {bytes(scratch.first), scratch.second}};
    }
    found_inf_ = reinterpret_cast<float*>(found_inf);
    swapped_ = reinterpret_cast<const float*>(swapped);
  }

  /// Returns the bytes of a GPU's scratch memory for values of a dtype: for all runs, so that they
  /// share their launches, but no more than kScratchBytes if the largest run needs less.
  size_t scratch_bytes(DType dtype) const {
    size_t largest = 0, all = 0;
    for (const auto& chunk : chunks_) {
      for (const coded::PieceRun& run : chunk) {
        const size_t one = coded::Shots::scratch_bytes(pieces_[run.piece], run.numel, dtype);
        largest = std::max(largest, one);
        all += one;
      }
    }
    return std::max(largest, std::min(all, kScratchBytes));
  }

  /// Encodes chunks [first, last) of each row, one after the other. Returns the bytes of each.
  std::vector<size_t> contribute(const CodedValues& values, size_t first, size_t last,
                                 uintptr_t out, size_t capacity) {
    check_rows(values);
    size_t most = 0;
    for (size_t c = first; c < last; c++) most += most_.at(c);
    check_room(most * values.rows, capacity);
    std::vector<size_t> sizes;
    run(values, [&](coded::Shots& shots) {
      uint8_t* to = bytes(out);
      for (size_t row = 0; row < values.rows; row++) {
        for (size_t c = first; c < last; c++) {
          sizes.push_back(shots.contribute(chunk(c), row, to));
          to += sizes.back();
        }
      }
    });
    return sizes;
  }

  /// Makes the result of chunk c from the received payloads and encodes it. Returns its bytes.
  size_t own(const CodedValues& values, size_t c, const CodedPayloads& received, uintptr_t out,
             size_t capacity) {
    const auto payloads = of_ranks(received);
    check_room(most_.at(c), capacity);
    size_t used = 0;
    run(values, [&](coded::Shots& shots) { used = shots.own(chunk(c), payloads, bytes(out)); });
    return used;
  }

  /// Sums chunk c of the received payloads. Returns true if the result is finite.
  bool add_up(const CodedValues& values, size_t c, const CodedPayloads& received) {
    const auto payloads = of_ranks(received);
    chunks_.at(c);
    return run(values, [&](coded::Shots& shots) { shots.add_up(chunk(c), payloads); });
  }

  /// Decodes chunks [first, last) of each row. Returns true if the result is finite.
  bool land(const CodedValues& values, size_t first, size_t last, const CodedPayloads& received) {
    const auto payloads = spans(received);
    if (first > last || last > chunks_.size() || payloads.size() != values.rows * (last - first)) {
      throw Error("got " + std::to_string(payloads.size()) + " payloads; give " +
                  std::to_string(values.rows) + " of each chunk");
    }
    return run(values, [&](coded::Shots& shots) {
      size_t i = 0;
      for (size_t row = 0; row < values.rows; row++) {
        for (size_t c = first; c < last; c++, i++) {
          shots.land(chunk(c), row, payloads[i], static_cast<int>(i));
        }
      }
    });
  }

 private:
  static void set_memory(Piece& piece, const std::array<Addresses, 3>& memory, size_t old,
                         size_t fresh) {
    const auto of = [&](const Addresses& at) {
      return feedback::Memory{bytes(at[old]), bytes(at[fresh])};
    };
    const auto& [worker, owner, momentum] = memory;
    piece.worker.error = of(worker);
    piece.worker.momentum = of(momentum);
    piece.owner.error = of(owner);
  }

  Span<const Piece> pieces() const { return {pieces_.data(), pieces_.size()}; }
  Span<const coded::PieceRun> chunk(size_t c) const {
    return {chunks_[c].data(), chunks_[c].size()};
  }

  const CodedArgs& at(const CodedValues& values) {
    if (ranks_ == 0)
      throw Error("begin() has not been called; call it before the values are coded");
    if (values.rows == 0 || numel_ > kLargestBuffer / sizeof(float) / values.rows) {
      throw Error("no memory holds " + std::to_string(values.rows) + " rows of " +
                  std::to_string(numel_) + " elements");
    }
    if (values.numel != values.rows * numel_) {
      throw Error("a tensor has " + std::to_string(values.numel) + " values, but the bucket has " +
                  std::to_string(numel_) + " in each of " + std::to_string(values.rows) + " rows");
    }
    args_.data = {pointer(values.address), values.numel, values.dtype};
    return args_;
  }

  void check_rows(const CodedValues& values) const {
    if (values.rows != rows_) {
      throw Error("the residuals have " + std::to_string(rows_) + " rows, but the values have " +
                  std::to_string(values.rows));
    }
  }

  std::vector<Span<const uint8_t>> spans(const CodedPayloads& received) const {
    std::vector<Span<const uint8_t>> payloads;
    for (const auto& [offset, size] : received.places) {
      const size_t behind = room_behind_ > received.capacity ? 0 : received.capacity - room_behind_;
      if (room_behind_ > received.capacity || offset > behind || size > behind - offset ||
          offset % 4 != 0) {
        throw Error("a payload must begin at a multiple of 4, with " +
                    std::to_string(room_behind_) + " more bytes of memory behind it");
      }
      payloads.emplace_back(bytes(received.address) + offset, size);
    }
    return payloads;
  }
  std::vector<Span<const uint8_t>> of_ranks(const CodedPayloads& received) const {
    const auto payloads = spans(received);
    if (payloads.size() != static_cast<size_t>(ranks_))
      throw Error("got payloads of " + std::to_string(payloads.size()) + " ranks; give those of " +
                  std::to_string(ranks_));
    return payloads;
  }

  static void check_room(size_t bytes, size_t capacity) {
    if (bytes <= capacity) return;
    throw Error("the output has " + std::to_string(capacity) +
                " bytes, but the payloads may need " + std::to_string(bytes) + "; make it larger");
  }

  /// Returns true if the decoded values are finite.
  template <typename F>
  bool run(const CodedValues& values, const F& f) {
    const CodedArgs& args = at(values);
    const GilReleased release;
    const DefaultArithmetic arithmetic;
    coded::Shots shots(args, values.rows, rank_, divisor_, stream_, found_inf_, swapped_);
    f(shots);
    shots.start();
    return shots.finite();
  }

  const size_t rows_;
  std::vector<Piece> pieces_;
  std::vector<std::array<Addresses, 3>> memories_;  ///< worker, owner, momentum
  std::vector<py::object> codecs_;                  ///< kept alive
  std::vector<std::vector<coded::PieceRun>> chunks_;
  std::vector<size_t> most_;
  size_t numel_ = 0, room_behind_ = 0;
  CodedArgs args_;
  int rank_ = 0, ranks_ = 0, divisor_ = 1;
  Stream stream_;
  float* found_inf_ = nullptr;
  const float* swapped_ = nullptr;
};

}  // namespace

void bind_coded(py::module_& m) {
  py::class_<CodedValues>(m, "CodedValues")
      .def(py::init<uintptr_t, size_t, DType, size_t>(), py::arg("address"), py::arg("numel"),
           py::arg("dtype"), py::arg("rows") = 1);
  py::class_<CodedPayloads>(m, "CodedPayloads")
      .def(py::init<uintptr_t, size_t, std::vector<Place>>(), py::arg("address"),
           py::arg("capacity"), py::arg("places"));
  py::class_<CodedBucket>(m, "CodedBucket")
      .def(py::init<size_t>(), py::arg("rows") = 1)
      .def("add", &CodedBucket::add, py::arg("numel"), py::arg("codec"), py::kw_only(),
           py::arg("tensor") = 0, py::arg("kind") = feedback::Kind::residual,
           py::arg("storage") = feedback::Storage::float32, py::arg("decay") = 0.0,
           py::arg("nesterov") = false, py::arg("worker") = Addresses{},
           py::arg("owner") = Addresses{}, py::arg("momentum") = Addresses{})
      .def("add_chunk", &CodedBucket::add_chunk, py::arg("runs"))
      .def_property_readonly("most", &CodedBucket::most)
      .def_property_readonly("room_behind", &CodedBucket::room_behind)
      .def("begin", &CodedBucket::begin, py::arg("sides"), py::kw_only(), py::arg("rank"),
           py::arg("ranks"), py::arg("seed"), py::arg("step"), py::arg("divisor"),
           py::arg("stream") = py::none(), py::arg("scratch") = Place{}, py::arg("found_inf") = 0,
           py::arg("swapped") = 0)
      .def("scratch_bytes", &CodedBucket::scratch_bytes, py::arg("dtype"))
      .def("contribute", &CodedBucket::contribute, py::arg("values"), py::arg("first"),
           py::arg("last"), py::arg("out"), py::arg("capacity"))
      .def("own", &CodedBucket::own, py::arg("values"), py::arg("chunk"), py::arg("received"),
           py::arg("out"), py::arg("capacity"))
      .def("add_up", &CodedBucket::add_up, py::arg("values"), py::arg("chunk"), py::arg("received"))
      .def("land", &CodedBucket::land, py::arg("values"), py::arg("first"), py::arg("last"),
           py::arg("received"));
}

}  // namespace pycomm
