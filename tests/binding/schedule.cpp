// Schedules for tests: the choice of algorithms, shares, and the seeds of hops.
#include <pybind11/stl.h>

#include <tuple>

#include "collectives/algorithms/dispatch.h"
#include "collectives/coded/coded.h"
#include "tests/binding/module.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// Returns the workload of a call with this tag, whose longest buffer has `bytes`, over TCP.
Workload call(const OpTag& tag, int ranks, size_t bytes) {
  return {tag.op, ranks, bytes, Medium::tcp};
}

}  // namespace

void bind_schedule(py::module_& m) {
  m.def("hop_seed", &coded::hop_seed, py::arg("seed"), py::arg("rank"));

  py::module_ s = m.def_submodule("schedule", "Costs and shares: csrc/collectives/common.");
  s.def("best_shares", &best_shares, py::arg("rates"));
  s.def(
      "select",
      [](const OpTag& tag, int ranks, size_t bytes, const std::string& wanted, double way,
         double byte, double shared) {
        Workload workload = call(tag, ranks, bytes);
        workload.speed = {way, byte, shared};
        return kAlgoNames[static_cast<size_t>(dispatch::select(workload, parse_algo(wanted)))];
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
        const Cost found = dispatch::cost(call(tag, ranks, bytes), parse_algo(algo));
        return py::make_tuple(found.rounds, found.messages, found.sent, found.folded,
                              seconds(found, Medium::tcp));
      },
      py::arg("tag"), py::arg("ranks"), py::arg("bytes"), py::arg("algo"));
}

}  // namespace pycomm
