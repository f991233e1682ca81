// Module pycomm._c10d. Only the files of binding/torch include torch; CMake makes one compilation
// unit of them, because one torch include costs 20 s.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "binding/torch/backend.h"

namespace pycomm::torch_binding {
namespace {

intrusive_ptr<BackendOptions> make_options(Milliseconds timeout, const py::kwargs& given) {
  auto options = c10::make_intrusive<BackendOptions>(timeout);
  const py::object self = py::cast(options);
  for (const auto& [name, value] : given) {
    if (!py::hasattr(self, name))
      throw py::type_error("pycomm.Options has no option " + py::repr(name).cast<std::string>());
    py::setattr(self, name, value);
  }
  return options;
}

template <typename Class, typename T>
void group_option(Class& options, const char* name, T GroupOptions::* member) {
  options.def_property(
      name, [member](const BackendOptions& self) { return self.communicator.*member; },
      [member](BackendOptions& self, const T& value) { self.communicator.*member = value; });
}

template <typename T>
T one_of(const char* what, const std::string& name,
         std::initializer_list<std::pair<const char*, T>> choices) {
  for (const auto& [known, value] : choices)
    if (name == known) return value;
  std::string all;
  for (const auto& choice : choices) all += (all.empty() ? "" : ", ") + std::string(choice.first);
  throw Error("unknown " + std::string(what) + " \"" + name + "\"; use one of " + all);
}

void add_part(Layout& layout, size_t numel, const std::string& codec, uint32_t tensor,
              const std::string& kind, const std::string& storage, float decay,
              const Layout::Pair& worker, const Layout::Pair& owner, const Layout::Pair& momentum,
              const feedback::Spans& worker_spans, const feedback::Spans& owner_spans) {
  using feedback::Kind;
  using feedback::Storage;
  feedback::Feedback how;
  how.kind = one_of<Kind>(
      "feedback", kind,
      {{"residual", Kind::residual}, {"decay", Kind::decay}, {"momentum", Kind::momentum}});
  how.storage =
      one_of<Storage>("storage", storage, {{"float32", Storage::float32}, {"int8", Storage::int8}});
  how.decay = decay;
  layout.add(numel, codec, tensor, how, worker, owner, momentum, worker_spans, owner_spans);
}

/// Does the same as then() of the work's future, but the callback gets the value, and an error of
/// the work keeps its type: torch makes a RuntimeError of all that a callback in Python raises.
std::shared_ptr<torch::jit::PythonFutureWrapper> then(const intrusive_ptr<c10d::Work>& work,
                                                      py::function callback) {
  auto kept = std::make_shared<torch::jit::PythonFunctionGuard>(std::move(callback));
  const c10::TypePtr object = c10::PyObjectType::get();
  auto future = work->getFuture()->then(
      [kept, object](Future& done) {
        if (done.hasError()) std::rethrow_exception(done.exception_ptr());
        GilAcquired gil;
        return torch::jit::toIValue(kept->func_(torch::jit::toPyObject(done.value())), object);
      },
      object);
  return std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future));
}

intrusive_ptr<Backend> make_backend(const intrusive_ptr<c10d::Store>& store, int rank, int size,
                                    intrusive_ptr<BackendOptions> options, const std::string& name,
                                    const Backend* parent) {
  Parent group;
  if (parent) {
    const auto& ranks = options->global_ranks_in_group;
    group = parent->as_parent({ranks.begin(), ranks.end()});
  }
  return Backend::make(store, rank, size, std::move(options), name, group);
}

void bind(py::module_& m) {
  // Errors that torch's own bindings let through reach Python with their type.
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (python_error& error) {
      error.restore();
    }
  });
  py::register_local_exception_translator(translate_errors);
  set_interrupt_check(&check_signals);
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    // Python keeps what it has printed as uncaught.
    const py::object error = py::getattr(py::module_::import("sys"), "last_value", py::none());
    const auto kind = py::str(py::type::of(error).attr("__name__")).cast<std::string>();
    OpenGroups::all().shutdown(error.is_none() ? "" : "ended by an uncaught " + kind);
  }));

  py::class_<BackendOptions, intrusive_ptr<BackendOptions>, c10d::Backend::Options> options(
      m, "Options");
  options.def(py::init(&make_options), py::arg("timeout") = env().timeout)
      .def("__copy__",
           [](const BackendOptions& self) { return c10::make_intrusive<BackendOptions>(self); })
      .def("__deepcopy__", [](const BackendOptions& self, const py::dict&) {
        return c10::make_intrusive<BackendOptions>(self);
      });
#define GROUP_OPTION(type, name, ...) group_option(options, #name, &GroupOptions::name)
#include "core/option_table.h"
  options
      .def_property(
          "enable_reconfigure", [](const BackendOptions& self) { return self.enable_reconfigure; },
          [](BackendOptions& self, bool value) { self.enable_reconfigure = value; })
      .def_property(
          "device_path", [](const BackendOptions& self) { return self.device_path; },
          [](BackendOptions& self, const std::string& path) {
            self.device_path =
                one_of<std::string>("device_path", path, {{"auto", "auto"}, {"host", "host"}});
          });

  // The first two are addresses of functions of the types in core/stream_hold.h.
  m.def(
      "set_device_abilities",
      [](const std::string& type, uintptr_t hold, uintptr_t exchange_capture_mode,
         bool host_addressable) {
        set_abilities(
            c10::Device(type).type(),
            {reinterpret_cast<StreamHold>(hold),
             reinterpret_cast<ExchangeCaptureMode>(exchange_capture_mode), host_addressable});
      },
      py::arg("device_type"), py::arg("stream_hold") = 0, py::arg("exchange_capture_mode") = 0,
      py::arg("host_addressable") = false);

  py::class_<Work, c10d::Work, intrusive_ptr<Work>>(m, "Work").def_property_readonly(
      "finite", py::cpp_function(&Work::finite, py::call_guard<GilReleased>()));

  using FutureOfPython = std::shared_ptr<torch::jit::PythonFutureWrapper>;
  m.def("then", &then, py::arg("work"), py::arg("callback"));

  py::class_<Layout, std::shared_ptr<Layout>>(m, "Layout")
      .def(py::init<size_t, bool>(), py::arg("rows") = 1, py::arg("owner_residuals") = true)
      .def("add", &add_part, py::arg("numel"), py::arg("codec"), py::arg("tensor"), py::kw_only(),
           py::arg("kind") = "residual", py::arg("storage") = "float32", py::arg("decay") = 0.0f,
           py::arg("worker") = std::nullopt, py::arg("owner") = std::nullopt,
           py::arg("momentum") = std::nullopt, py::arg("worker_spans") = feedback::kAllValues,
           py::arg("owner_spans") = feedback::kAllValues)
      .def_property_readonly("numel", &Layout::numel)
      .def_property_readonly("owner_residuals", &Layout::owner_residuals);

  py::class_<Backend, c10d::Backend, intrusive_ptr<Backend>>(m, "Backend")
      .def(py::init(&make_backend), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("options"), py::arg("name"), py::arg("parent") = nullptr,
           py::call_guard<GilReleased>())
      .def_property_readonly("options", &Backend::getBackendOptions)
      .def_property_readonly("levels", &Backend::levels)
      .def_property_readonly("shares", &Backend::shares)
      .def("describe", &Backend::describe)
      .def_property_readonly("transports", &Backend::transports)
      .def("check", &Backend::check)
      .def("trace", &Backend::trace)
      .def_property_readonly("wire_bytes", &Backend::wire_bytes)
      .def_property_readonly("sent_bytes", &Backend::sent_bytes)
      .def(
          "wait", [](Backend& b, const FutureOfPython& future) { b.wait(*future->fut); },
          py::arg("future"), py::call_guard<GilReleased>())
      .def(
          "wait_after_backward",
          [](Backend& b, const FutureOfPython& future) { b.wait_after_backward(future->fut); },
          py::arg("future"), py::call_guard<GilReleased>())
      .def("get_error", &Backend::getError)
      .def("handle", &Backend::handle)
      .def("is_gone", &Backend::is_gone, py::arg("handle"))
      .def(
          "form",
          py::overload_cast<int64_t, const std::vector<std::string>&, Milliseconds>(&Backend::form),
          py::arg("uuid"), py::arg("handles"), py::arg("timeout"))
      .def_property_readonly("formed", &Backend::formed)
      .def(
          "set_shape_of",
          [](const Backend& self, const intrusive_ptr<c10d::ProcessGroup>& group) {
            self.set_shape_of(*group);
          },
          py::arg("group"))
      .def(
          "perform_nocolor_split", [](const Backend&, const py::object&) {}, py::arg("device"))
      // Torch's own allocate_tensor would call allocateTensor(), which serves its reducer.
      .def(
          "allocate_tensor",
          [](Backend& b, int64_t size, at::ScalarType dtype, at::Device device) {
            return b.allocate(size, at::TensorOptions(dtype).device(device));
          },
          py::arg("size"), py::kw_only(), py::arg("dtype"), py::arg("device"),
          py::call_guard<GilReleased>())
      .def("why_no_peers", &Backend::why_no_peers, py::arg("device"))
      .def("most_payload_bytes", &Backend::most_payload_bytes, py::arg("device"))
      .def(
          "compressed_all_reduce",
          [](Backend& b, const at::Tensor& tensor, const std::shared_ptr<const Layout>& layout,
             const std::vector<Sides>& sides, uint64_t seed, uint32_t step, bool average) {
            return b.compressed(Op::all_reduce, tensor, tensor, layout,
                                {sides, seed, step, average});
          },
          py::arg("tensor"), py::arg("layout"), py::arg("sides"), py::arg("seed"), py::arg("step"),
          py::arg("average") = true)
      .def(
          "compressed_reduce_scatter",
          [](Backend& b, const at::Tensor& output, const at::Tensor& input,
             const std::shared_ptr<const Layout>& layout, const std::vector<Sides>& sides,
             uint64_t seed, uint32_t step, bool average) {
            return b.compressed(Op::reduce_scatter, output, input, layout,
                                {sides, seed, step, average});
          },
          py::arg("output"), py::arg("input"), py::arg("layout"), py::arg("sides"), py::arg("seed"),
          py::arg("step"), py::arg("average") = true);
}

}  // namespace
}  // namespace pycomm::torch_binding

PYBIND11_MODULE(_c10d, m) {
  m.doc() = "The \"pycomm\" process group for torch.distributed.";
  pybind11::module_::import("torch.distributed");
  pycomm::torch_binding::bind(m);
}
