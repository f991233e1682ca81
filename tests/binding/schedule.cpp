// Schedules for tests: the index arithmetic of collectives, the choice of algorithms, and the seeds
// of hops.
#include "collectives/common/schedule.h"

#include <pybind11/stl.h>

#include <tuple>
#include <utility>

#include "collectives/coded/coded.h"
#include "collectives/coded/one_shot.h"
#include "collectives/common/select.h"
#include "core/env.h"
#include "tests/binding/module.h"

namespace py = pybind11;

namespace pycomm {
namespace {

using Pair = std::pair<size_t, size_t>;
using Triple = std::tuple<size_t, size_t, size_t>;

Pair pair(const schedule::Range& range) { return {range.begin, range.end}; }

/// Makes parts from (numel, granule) of consecutive parts.
std::vector<schedule::Part> parts_of(const std::vector<Pair>& sizes) {
  std::vector<schedule::Part> parts;
  size_t offset = 0;
  for (const auto& [numel, granule] : sizes) {
    parts.push_back({offset, numel, granule});
    offset += numel;
  }
  return parts;
}

/// Returns, per rank and segment, the runs (part, offset, numel) of a bucket.
std::vector<std::vector<std::vector<Triple>>> bucket_runs(const std::vector<Pair>& sizes, int ranks,
                                                          size_t segment_numel) {
  const std::vector<schedule::Part> parts = parts_of(sizes);
  const Span<const schedule::Part> all(parts.data(), parts.size());
  const size_t numel = parts.empty() ? 0 : parts.back().offset + parts.back().numel;
  std::vector<std::vector<std::vector<Triple>>> result(ranks);
  for (int r = 0; r < ranks; r++) {
    const schedule::Range chunk = schedule::chunk(all, numel, ranks, r);
    schedule::for_segments(all, chunk, segment_numel, [&](const schedule::Range& segment) {
      auto& out = result[r].emplace_back();
      schedule::for_runs(all, segment, [&](const schedule::Run& run) {
        out.emplace_back(run.part, run.offset, run.numel);
      });
    });
  }
  return result;
}

/// Returns the workload of a call with this tag, whose longest buffer has `bytes`, over TCP.
Workload call(const OpTag& tag, int ranks, size_t bytes) {
  return {tag.op, ranks, bytes, Medium::tcp};
}

}  // namespace

void bind_schedule(py::module_& m) {
  m.def("hop_seed", &coded::hop_seed, py::arg("seed"), py::arg("rank"));

  py::module_ s =
      m.def_submodule("schedule", "Index arithmetic: csrc/collectives/common/schedule.h.");
  s.def(
      "chunk",
      [](size_t numel, int count, int index, size_t granule) {
        return pair(schedule::chunk(numel, count, index, granule));
      },
      py::arg("numel"), py::arg("count"), py::arg("index"), py::arg("granule"));
  s.def(
      "shares",
      [](size_t numel, const std::vector<double>& parts, size_t granule) {
        const Shares shares(parts);
        std::vector<Pair> result;
        const int count = static_cast<int>(parts.size());
        for (int i = 0; i < count; i++) {
          result.push_back(pair(schedule::chunk(numel, count, i, granule, shares)));
        }
        return result;
      },
      py::arg("numel"), py::arg("parts"), py::arg("granule"));
  s.def("best_shares", &best_shares, py::arg("rates"));
  // Begins of the shares of exact and of coded sums, and what describe() says.
  s.def(
      "shares_by_links",
      [](const std::vector<std::string>& declared, const std::vector<double>& measured) {
        std::vector<LinkRate> rates;
        for (const std::string& rate : declared) rates.push_back(parse_link_rate(rate));
        Links links(rates);
        links.set_measured(measured);
        return std::make_tuple(links.exact_shares().begins(), links.shares().begins(),
                               links.describe());
      },
      py::arg("declared"), py::arg("measured"));
  s.def(
      "segments",
      [](Pair chunk, size_t segment_numel) {
        const schedule::Range range{chunk.first, chunk.second};
        std::vector<Pair> result;
        for (size_t i = 0; i < schedule::num_segments(range, segment_numel); i++) {
          result.push_back(pair(schedule::segment(range, segment_numel, i)));
        }
        return result;
      },
      py::arg("chunk"), py::arg("segment_numel"));
  s.def("bucket_runs", &bucket_runs, py::arg("parts"), py::arg("ranks"), py::arg("segment_numel"));

  s.def(
      "select",
      [](const OpTag& tag, int ranks, size_t bytes, const std::string& wanted, double way,
         double byte, double shared) {
        Workload workload = call(tag, ranks, bytes);
        workload.speed = {way, byte, shared};
        return kAlgoNames[static_cast<size_t>(select(workload, parse_algo(wanted)))];
      },
      py::arg("tag"), py::arg("ranks"), py::arg("bytes"), py::arg("wanted") = "auto",
      py::arg("way") = 0.0, py::arg("byte") = 0.0, py::arg("shared") = 0.0);
  s.def(
      "shot_costs",
      [](size_t values, size_t payload, int ranks, double way, double byte, double shared) {
        const coded::ShotCosts costs =
            coded::shot_costs(values, payload, ranks, {way, byte, shared});
        return std::make_tuple(costs.one, costs.two);
      },
      py::arg("values"), py::arg("payload"), py::arg("ranks"), py::arg("way"), py::arg("byte"),
      py::arg("shared") = 0.0);
  s.def(
      "cost",
      [](const OpTag& tag, int ranks, size_t bytes, const std::string& algo) {
        const Cost found = cost(call(tag, ranks, bytes), parse_algo(algo));
        return py::make_tuple(found.rounds, found.messages, found.sent, found.folded,
                              seconds(found, Medium::tcp));
      },
      py::arg("tag"), py::arg("ranks"), py::arg("bytes"), py::arg("algo"));
}

}  // namespace pycomm
