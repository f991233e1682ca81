// Module pycomm._test: parts of the core that only tests call by themselves. It is built in a
// checkout (PYCOMM_TESTS), beside _C, whose types it shares, and is in no wheel.
#include "tests/binding/module.h"

#include <memory>

#include "binding/core/errors.h"
#include "collectives/communicator.h"

namespace py = pybind11;

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
