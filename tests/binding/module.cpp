// Module pycomm._test: parts of the core that only tests call by themselves. It is built in a
// checkout (PYCOMM_TESTS), beside _C, whose types it shares, and is in no wheel. Here are the small
// ones: tools of csrc/core, the queue of operations, and the choice of algorithms.
#include "tests/binding/module.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string_view>
#include <tuple>

#include "binding/core/arguments.h"
#include "binding/core/errors.h"
#include "binding/core/gil.h"
#include "collectives/algorithms/dispatch.h"
#include "collectives/coded/coded.h"
#include "collectives/communicator.h"
#include "collectives/queue.h"
#include "core/crc32c.h"
#include "core/env.h"
#include "core/philox.h"
#include "core/reduce.h"
#include "core/sha256.h"

namespace py = pybind11;

namespace pycomm {
namespace {

// ------------------------------------------------------------------ tools of csrc/core

py::bytes to_bytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

bool all_finite_address(uintptr_t x, size_t numel) {
  GilReleased release;
  return all_finite({reinterpret_cast<const float*>(x), numel});
}

Span<const uint8_t> span_of(std::string_view data) {
  return {reinterpret_cast<const uint8_t*>(data.data()), data.size()};
}

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  const Random4 out =
      philox4x32_10({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
  return {out.word[0], out.word[1], out.word[2], out.word[3]};
}

std::array<uint32_t, 4> random_words_of(uint64_t seed, uint32_t step, uint32_t tensor,
                                        uint64_t group) {
  const Random4 out = random_words(seed, step, tensor, group);
  return {out.word[0], out.word[1], out.word[2], out.word[3]};
}

void bind_tools(py::module_& m) {
  m.def("all_finite", &all_finite_address, py::arg("x"), py::arg("numel"));

  m.def("philox", &philox, py::arg("counter"), py::arg("key"));
  m.def("random_words", &random_words_of, py::arg("seed"), py::arg("step"), py::arg("tensor"),
        py::arg("group"));
  m.def("crc32c_ways", &crc32c_ways);
  m.def(
      "crc32c_by",
      [](const std::string& way, std::string_view data, uint32_t before) {
        return crc32c_by(way, span_of(data), before);
      },
      py::arg("way"), py::arg("data"), py::arg("before") = 0);
  m.def(
      "sha256", [](std::string_view message) { return to_bytes(sha256(message)); },
      py::arg("message"));
  m.def(
      "hmac_sha256",
      [](std::string_view key, std::string_view message) {
        return to_bytes(hmac_sha256(key, message));
      },
      py::arg("key"), py::arg("message"));

  m.def("parse_rate", &parse_rate, py::arg("text"));
  m.def("parse_link_rate", [](const std::string& text) {
    const LinkRate rate = parse_link_rate(text);
    return py::make_tuple(rate.send, rate.receive, rate.paced);
  });
}

// ------------------------------------------------------------------ queue

/// Makes a queue. Its end waits for its thread, which needs the interpreter.
std::shared_ptr<Queue> make_queue() {
  return {new Queue, [](Queue* queue) {
            std::optional<GilReleased> release;
            if (PyGILState_Check()) release.emplace();
            delete queue;
          }};
}

void bind_queue(py::module_& m) {
  py::class_<Queue, std::shared_ptr<Queue>>(m, "Queue")
      .def(py::init(&make_queue))
      .def(
          "submit",
          [](Queue& queue, py::object op) {
            // Any thread may call and drop it.
            const std::shared_ptr<py::object> held(new py::object(std::move(op)),
                                                   [](py::object* dropped) {
                                                     const GilAcquired gil;
                                                     delete dropped;
                                                   });
            const GilReleased release;
            queue.submit([held] {
              const GilAcquired gil;
              (*held)();
            });
          },
          py::arg("op"));
}

// ------------------------------------------------------------------ schedules

/// Returns the workload of a call with this tag, whose longest buffer has `bytes`, over TCP.
Workload call(const OpTag& tag, int ranks, size_t bytes) {
  return {tag.op, ranks, bytes, Medium::tcp};
}

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

}  // namespace
}  // namespace pycomm

PYBIND11_MODULE(_test, m) {
  py::module_::import("pycomm._C");
  py::register_local_exception_translator(pycomm::translate_errors);
  pycomm::bind_tools(m);
  pycomm::bind_transports(m);
  pycomm::bind_codecs(m);
  pycomm::bind_device(m);
  pycomm::bind_queue(m);
  pycomm::bind_schedule(m);
  using Self = pycomm::Communicator;
  m.def(
      "heap_bytes",
      [](const Self& c) {
        const auto heap = c.heap();
        return heap ? std::pair(heap->used(), heap->kept()) : std::pair<size_t, size_t>();
      },
      py::arg("communicator"), "Bytes of its heap that are in use, and that are kept.");
}
