// Queue for tests: runs callables in the order of submission, as collectives/queue.h says.
#include "collectives/queue.h"

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "binding/core/arguments.h"
#include "binding/core/gil.h"
#include "tests/binding/module.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// Makes a queue. Its end waits for its thread, which needs the interpreter.
std::shared_ptr<Queue> make_queue() {
  return {new Queue, [](Queue* queue) {
            std::optional<GilReleased> release;
            if (PyGILState_Check()) release.emplace();
            delete queue;
          }};
}

/// A callable that any thread may call and drop. What it raises goes to sys.unraisablehook: the
/// callable is expected to keep its errors.
class Operation {
 public:
  explicit Operation(py::object op)
      : op_(new py::object(std::move(op)), [](py::object* held) {
          const GilAcquired gil;
          delete held;
        }) {}
  void operator()() const {
    const GilAcquired gil;
    try {
      (*op_)();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("an operation of pycomm");
    }
  }

 private:
  std::shared_ptr<py::object> op_;
};

}  // namespace

void bind_queue(py::module_& m) {
  py::class_<Queue, std::shared_ptr<Queue>>(m, "Queue")
      .def(py::init(&make_queue))
      .def(
          "submit",
          [](Queue& queue, py::object op) {
            const Operation operation(std::move(op));
            const GilReleased release;
            queue.submit(operation);
          },
          py::arg("op"))
      .def(
          "run",
          [](Queue& queue, const py::object& op) {
            const GilReleased release;
            queue.run([&op] {
              const GilAcquired gil;
              op();
            });
          },
          py::arg("op"));
}

}  // namespace pycomm
