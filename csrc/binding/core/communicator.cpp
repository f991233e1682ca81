// Communicator for Python: pycomm/communicator.py checks arrays, and only addresses, sizes in
// elements and times in seconds come here.
#include "collectives/communicator.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "binding/core/arguments.h"
#include "binding/core/errors.h"
#include "binding/core/gil.h"
#include "binding/core/module.h"
#include "binding/core/trace_records.h"
#include "core/error.h"
#include "transports/store.h"

namespace py = pybind11;

namespace pycomm {
namespace {

using Release = GilReleased;
using Request = Communicator::Request;

/// Objects of Python that C++ keeps, and that threads without the interpreter's lock drop.
///
/// A thread that moves bytes neither waits for the lock, which Python holds for milliseconds, nor
/// asks for it at the interpreter's end, where it would not come back. What it drops is put aside,
/// and released by a thread that has the lock.
class Kept {
 public:
  /// Returns what keeps an object, and its memory if it has a buffer, which then cannot be resized.
  static std::shared_ptr<void> hold(const pybind11::object& object) {
    PyObject* held = PyMemoryView_FromObject(object.ptr());
    if (held == nullptr) {  // a tensor, or an array whose dtype buffers do not know
      PyErr_Clear();
      held = object.inc_ref().ptr();
    }
    return {held, [](void* dropped) { put_aside(static_cast<PyObject*>(dropped)); }};
  }
  /// Releases what was dropped. The caller has the lock.
  static void release() {
    std::vector<PyObject*> objects;
    {
      const std::lock_guard<std::mutex> lock(mutex());
      objects.swap(aside());
    }
    for (PyObject* object : objects) Py_DECREF(object);
  }

 private:
  static void put_aside(PyObject* object) {
    if (!Py_IsInitialized()) return;
    bool first = false;
    {
      const std::lock_guard<std::mutex> lock(mutex());
      first = aside().empty();
      aside().push_back(object);
    }
    const auto call = [](void*) {
      release();
      return 0;
    };
    // If Python has too many calls waiting, the next transfer of this process releases it.
    if (first) Py_AddPendingCall(call, nullptr);
  }
  // Never destroyed: threads may outlive what is static.
  static std::mutex& mutex() {
    static auto* made = new std::mutex;
    return *made;
  }
  static std::vector<PyObject*>& aside() {
    static auto* made = new std::vector<PyObject*>;
    return *made;
  }
};

/// Returns what a function returns that runs without the interpreter's lock.
template <typename Function>
auto without_gil(const Function& function) {
  const Release release;
  return function();
}

/// Makes a communicator. Its end may wait for other threads that need the interpreter, so the GIL
/// is released for both.
std::shared_ptr<Communicator> make_communicator(std::shared_ptr<Store> store, int rank, int size,
                                                CommunicatorOptions options) {
  const Release release;
  return {new Communicator(std::move(store), rank, size, options), [](Communicator* communicator) {
            std::optional<Release> release;
            if (PyGILState_Check()) release.emplace();
            delete communicator;
          }};
}

/// Posts a send or receive. Returns a request that keeps its group, and that `array` outlives,
/// whose memory is in use until the transfer ends, also if nobody waits for it. (pybind11's
/// keep_alive crashes where an argument has a wrong type.)
template <auto kPost>
std::shared_ptr<Request> posted(std::shared_ptr<Communicator> group, uintptr_t data, size_t bytes,
                                int peer, int tag, const py::object& array) {
  struct Both {
    std::shared_ptr<Communicator> group;
    std::shared_ptr<Request> request;  // destroyed first
  };
  Kept::release();
  auto kept = array.is_none() ? nullptr : Kept::hold(array);
  const Release release;
  auto request = ((*group).*kPost)(pointer(data), bytes, peer, tag);
  if (kept) request->keep(std::move(kept));
  const auto both = std::make_shared<Both>(Both{std::move(group), std::move(request)});
  return {both, both->request.get()};
}

/// Memory of Communicator::allocate() as an array of one dimension. Numpy has no 8-bit floats and
/// no bfloat16: their buffers are of unsigned integers.
struct SharedArray {
  std::shared_ptr<void> memory;
  size_t numel;
  DType dtype;

  const char* format() const {
    constexpr const char* kFormats[] = {"f", "d", "e", "H", "B", "B", "b",  "h", "i",
                                        "q", "B", "H", "I", "Q", "?", "Zf", "Zd"};
    static_assert(sizeof kFormats / sizeof *kFormats == kDTypes);
    return kFormats[static_cast<size_t>(dtype)];
  }
  py::buffer_info buffer() const {
    const auto bytes = static_cast<py::ssize_t>(size_of(dtype));
    return {memory.get(), bytes, format(), 1, {static_cast<py::ssize_t>(numel)}, {bytes}};
  }
};

/// Returns address, elements, bytes per element and format of a contiguous buffer.
py::tuple buffer(const py::object& array, bool write) {
  Py_buffer view;
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (write ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(array.ptr(), &view, flags) != 0) {
    const py::error_already_set error;
    const std::string what = std::string("cannot use this ") + Py_TYPE(array.ptr())->tp_name + ": ";
    if (write && PyObject_GetBuffer(array.ptr(), &view, flags & ~PyBUF_WRITABLE) == 0) {
      PyBuffer_Release(&view);
      throw Error(what + "its values cannot change; pass a copy, numpy.array(x)");
    }
    PyErr_Clear();
    const bool exports = py::hasattr(array, "__dlpack__");
    throw Error(what + error.what() + (exports ? "; pass torch.from_dlpack(x)" : ""));
  }
  const size_t itemsize = static_cast<size_t>(std::max<Py_ssize_t>(1, view.itemsize));
  const py::tuple result = py::make_tuple(reinterpret_cast<uintptr_t>(view.buf),
                                          static_cast<size_t>(view.len) / itemsize, itemsize,
                                          view.format ? view.format : "B");
  PyBuffer_Release(&view);
  return result;
}

/// Runs a collective: op, input, out, numel, dtype, and with defaults redop, root, factor, timeout.
/// Python calls it without pybind11's dispatcher, which takes longer than the core for small data.
PyObject* run(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  const auto at = [&](Py_ssize_t i, auto otherwise) {
    return i < count ? py::handle(given[i]).cast<decltype(otherwise)>() : otherwise;
  };
  try {
    if (count < 5 || count > 9) throw py::type_error("Communicator.run takes 5 to 9 arguments");
    const char* op = PyUnicode_AsUTF8(given[0]);
    if (op == nullptr) throw py::error_already_set();
    const Collective call = collective(op, given[1], given[2], at(3, size_t{}), at(4, DType{}),
                                       at(5, ReduceOp::sum), at(6, -1), at(7, 1.0));
    const Milliseconds timeout = milliseconds(at(8, 0.0));
    auto& communicator = py::handle(self).cast<Communicator&>();
    const Release release;
    communicator.run(call, timeout);
  } catch (...) {
    py::detail::try_translate_exceptions();
    return nullptr;
  }
  Py_RETURN_NONE;
}

void bind_options(py::module_& m) {
  using Options = CommunicatorOptions;
  py::class_<Options, GroupOptions>(m, "CommunicatorOptions")
      .def(py::init<>())
      .def_readwrite("group", &Options::group)
      .def_property(
          "timeout", [](const Options& o) { return o.timeout.count() / 1e3; },
          [](Options& o, double seconds) { o.timeout = milliseconds(seconds); })
      .def_readwrite("description", &Options::description)
      .def_readwrite("global_ranks", &Options::global_ranks)
      .def_property(
          "parent", [](const Options& o) { return dynamic_cast<const Communicator*>(o.parent); },
          py::cpp_function([](Options& o, const Communicator* parent) { o.parent = parent; },
                           py::keep_alive<1, 2>()))  // it may be closed while a group is made
      .def_readwrite("parent_ranks", &Options::parent_ranks)
      .def_readwrite("segment_bytes", &Options::segment_bytes)
      .def_readwrite("nodes", &Options::nodes)
      .def_readwrite("sites", &Options::sites);
}

}  // namespace

void bind_communicator(py::module_& m) {
  m.attr("ALGOS") =
      py::tuple(py::cast(std::vector<std::string>(std::begin(kAlgoNames), std::end(kAlgoNames))));
  m.def("traces", [] {
    py::list traces;
    for (const auto& trace : Trace::all()) traces.append(trace_records(*trace));
    return traces;
  });
  m.def("buffer", &buffer, py::arg("array"), py::arg("write"));
  bind_options(m);

  py::class_<Request, std::shared_ptr<Request>>(m, "Request", py::dynamic_attr())
      .def("done",
           [](Request& r) {
             const bool done = without_gil([&] { return r.done(); });
             Kept::release();
             return done;
           })
      .def(
          "wait",
          [](Request& r, double timeout) {
            without_gil([&] { r.wait(milliseconds(timeout)); });
            Kept::release();
          },
          py::arg("timeout") = 0.0)
      .def("source", &Request::source, py::call_guard<Release>());

  py::class_<PartList>(m, "Parts")
      .def(py::init<const std::vector<std::pair<uintptr_t, size_t>>&>(), py::arg("parts"));

  py::class_<SharedArray>(m, "SharedArray", py::buffer_protocol())
      .def_buffer([](const SharedArray& array) { return array.buffer(); })
      .def("__len__", [](const SharedArray& array) { return array.numel; })
      .def_property_readonly("dtype", [](const SharedArray& array) { return name(array.dtype); });

  using Self = Communicator;
  py::class_<Self, std::shared_ptr<Self>> communicator(m, "Communicator");
  static PyMethodDef method = {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&run)),
                               METH_FASTCALL, nullptr};
  communicator.attr("run") = py::reinterpret_steal<py::object>(
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(communicator.ptr()), &method));
  communicator
      .def(py::init(&make_communicator), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("options"))
      .def_property_readonly("rank", &Self::rank)
      .def_property_readonly("size", &Self::size)
      .def_property(
          "timeout", [](const Self& c) { return c.timeout().count() / 1e3; },
          [](Self& c, double seconds) { c.set_timeout(milliseconds(seconds)); })
      .def("describe", &Self::describe)
      .def(
          "explain",
          [](const Self& c, std::string_view op, size_t bytes, const Pieces* pieces, DType dtype) {
            if (!pieces) return c.explain(op_named(op), bytes);
            const CodedArgs args = pieces->args(op_named(op), 1, 0, dtype);
            return c.explain(op_named(op), bytes, &args);
          },
          py::arg("op"), py::arg("bytes"), py::arg("pieces") = py::none(),
          py::arg("dtype") = DType::float32)
      .def_property_readonly("transports", &Self::transports)
      .def_property_readonly("levels", &Self::levels)
      .def_property_readonly("shares", &Self::shares)
      .def(
          "allocate",
          [](Self& c, size_t numel, DType dtype) {
            if (numel > SIZE_MAX / size_of(dtype)) {
              throw Error("rank " + std::to_string(c.rank()) + ": no memory holds " +
                          std::to_string(numel) + " elements; allocate fewer");
            }
            return SharedArray{c.allocate(numel * size_of(dtype)), numel, dtype};
          },
          py::arg("numel"), py::arg("dtype"))
      .def("trace", [](const Self& c) { return trace_records(c.trace()); })
      .def("wire_bytes", &Self::wire_bytes)
      .def("sent_bytes", &Self::sent_bytes)
      .def(
          "run_coded",
          [](Self& c, std::string_view op, uintptr_t input, uintptr_t out, const Pieces& pieces,
             bool average, uint64_t seed, uint32_t step, DType dtype, double timeout) {
            const Op named = op_named(op);
            const Release release;
            return c.run_coded(named,
                               pieces.args(named, c.size(), input, dtype, average, seed, step),
                               pointer(out), milliseconds(timeout));
          },
          py::arg("op"), py::arg("input"), py::arg("out"), py::arg("pieces"), py::kw_only(),
          py::arg("average") = true, py::arg("seed") = 0, py::arg("step") = 0,
          py::arg("dtype") = DType::float32, py::arg("timeout") = 0.0)
      .def("send", &posted<&Self::send>, py::arg("data"), py::arg("bytes"), py::arg("dst"),
           py::arg("tag") = 0, py::arg("keep") = py::none())
      .def("recv", &posted<&Self::recv>, py::arg("data"), py::arg("bytes"), py::arg("src"),
           py::arg("tag") = 0, py::arg("keep") = py::none())
      .def(
          "abort", [](Self& c, const std::string& reason) { c.abort(reason); }, py::arg("reason"),
          py::call_guard<Release>());
}

}  // namespace pycomm
