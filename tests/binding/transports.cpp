// Transports for tests. Programs use the communicator.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <tuple>

#include "binding/core/arguments.h"
#include "binding/core/errors.h"
#include "binding/core/gil.h"
#include "collectives/window/shared.h"
#include "core/env.h"
#include "tests/binding/module.h"
#include "transports/rendezvous.h"
#include "transports/seal.h"
#include "transports/shm/transport.h"
#include "transports/tcp/transport.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// An object of Python with `appends` and the methods set, append and find of a Store; some have
/// add and erase, and `round_trip` in seconds.
class PythonStore final : public Store {
 public:
  explicit PythonStore(py::object target) : target_(std::move(target)) {}
  ~PythonStore() override {
    const GilAcquired gil;
    target_ = py::object();
  }
  void set(const std::string& key, const std::string& value) override {
    const GilAcquired gil;
    target_.attr("set")(key, py::bytes(value));
  }
  std::optional<std::string> find(const std::string& key) override {
    const GilAcquired gil;
    return target_.attr("find")(key).cast<std::optional<std::string>>();
  }
  bool appends() const override {
    const GilAcquired gil;
    return target_.attr("appends").cast<bool>();
  }
  void append(const std::string& key, const std::string& value) override {
    const GilAcquired gil;
    target_.attr("append")(key, py::bytes(value));
  }
  int64_t count(const std::string& key) override {
    const GilAcquired gil;
    return py::hasattr(target_, "add") ? target_.attr("add")(key, 1).cast<int64_t>() : 0;
  }
  void erase(const std::string& key) override {
    const GilAcquired gil;
    target_.attr("erase")(key);
  }
  std::chrono::microseconds round_trip() const override {
    const GilAcquired gil;
    const auto seconds = py::getattr(target_, "round_trip", py::float_(0.0)).cast<double>();
    return std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
  }

 private:
  py::object target_;
};

Deadline after_seconds(double seconds) { return Deadline::after(milliseconds(seconds)); }

OpTag tag_of(const std::string& op, uint64_t seq, uint64_t numel, DType dtype, ReduceOp redop) {
  OpTag tag = make_tag(op_named(op), numel, dtype, redop);
  tag.seq = seq;
  return tag;
}

/// A transport that can be closed before Python collects it.
struct OwnedTransport {
  std::unique_ptr<Transport> transport;
  int rank;

  Transport& operator*() const {
    if (!transport) throw Error("the transport is closed; make a new one");
    return *transport;
  }
  /// Null if there is none of all ranks.
  Window* window() const {
    auto* shared = dynamic_cast<ShmTransport*>(&**this);
    return shared == nullptr ? nullptr : shared->window();
  }
};

std::unique_ptr<OwnedTransport> make_transport(const std::string& kind,
                                               std::shared_ptr<Store> store,
                                               const std::string& group, int rank, int size,
                                               double timeout, const py::kwargs& given) {
  GroupOptions options;
  const py::object fields = py::cast(&options, py::return_value_policy::reference);
  for (const auto& [name, value] : given) py::setattr(fields, name, value);
  GilReleased release;
  const Rendezvous rendezvous =
      make_rendezvous(std::move(store), group, rank, size, options.secret, milliseconds(timeout));
  auto owned = std::make_unique<OwnedTransport>();
  owned->rank = rank;
  if (kind == "shm") {
    owned->transport = ShmSetup().make(rendezvous, all_ranks(rendezvous));
    if (!owned->transport) {
      throw Error("shm: rank " + std::to_string(rank) +
                  " shares memory with no other rank; use tcp");
    }
  } else if (kind == "tcp") {
    owned->transport = TcpSetup(options).make(rendezvous, all_ranks(rendezvous));
  } else {
    throw Error("unknown transport \"" + kind + "\"; use one of shm, tcp");
  }
  return owned;
}

/// A channel, and the tickets to wait for.
using Goal = std::tuple<Channel*, uint64_t, uint64_t>;

/// Moves bytes until all tickets are done, as the communicator does.
void wait_for(const OwnedTransport& owned, int lane, const std::vector<Goal>& goals,
              double seconds) {
  GilReleased release;
  Transport& transport = *owned;
  const Deadline deadline = after_seconds(seconds);
  for (;;) {
    bool moved = false;
    bool reached = true;
    for (const auto& [channel, sent, received] : goals) {
      moved |= channel->progress();
      reached &= channel->sent() >= sent && channel->received() >= received;
    }
    if (reached) return;
    if (moved) continue;
    transport.check();
    if (deadline.expired()) {
      throw Timeout("the messages of the channels did not arrive within " +
                    std::to_string(seconds) + " s; check that the peers send and receive them");
    }
    transport.idle(static_cast<Lane>(lane), std::chrono::milliseconds(10));
  }
}

/// Waits for all ranks in their window.
void barrier(const OwnedTransport& owned) {
  GilReleased release;
  Window* window = owned.window();
  if (!window)
    throw Error("the transport has no window of all ranks; use one whose ranks share a host");
  const Collective call{Op::barrier};
  const OpTag tag = tag_of("barrier", 1, 0, DType::float32, ReduceOp::sum);
  shared::run(*window, tag, call.checked(window->rank(), window->size()), after_seconds(20));
}

}  // namespace

void bind_transports(py::module_& m) {
  py::class_<OpTag>(m, "OpTag")
      .def(py::init(&tag_of), py::arg("op"), py::kw_only(), py::arg("seq") = 1,
           py::arg("numel") = 0, py::arg_v("dtype", DType::float32, "DType.float32"),
           py::arg_v("redop", ReduceOp::sum, "ReduceOp.sum"))
      .def("__repr__", &describe);

  py::class_<Channel>(m, "Channel")
      .def(
          "send",
          [](Channel& channel, const OpTag& tag, uintptr_t data, size_t bytes) {
            GilReleased release;
            return channel.send(tag, {reinterpret_cast<const uint8_t*>(data), bytes});
          },
          py::arg("tag"), py::arg("data"), py::arg("bytes"))
      .def(
          "recv",
          [](Channel& channel, const OpTag& tag, uintptr_t data, size_t bytes) {
            GilReleased release;
            return channel.recv(tag, {reinterpret_cast<uint8_t*>(data), bytes});
          },
          py::arg("tag"), py::arg("data"), py::arg("bytes"))
      .def_property_readonly("sent", &Channel::sent)
      .def_property_readonly("received", &Channel::received)
      .def("progress", &Channel::progress, py::call_guard<GilReleased>());

  py::class_<OwnedTransport>(m, "Transport")
      .def(py::init(&make_transport), py::arg("kind"), py::arg("store"), py::arg("group"),
           py::arg("rank"), py::arg("size"), py::kw_only(), py::arg("timeout") = 300.0)
      .def("describe", [](const OwnedTransport& t) { return (*t).describe(); })
      .def("reaches", [](const OwnedTransport& t, int rank) { return (*t).reaches(rank); })
      .def(
          "channel",
          [](const OwnedTransport& t, int rank, int lane) -> Channel& {
            return (*t).channel(rank, static_cast<Lane>(lane));
          },
          py::arg("rank"), py::arg("lane") = 0, py::return_value_policy::reference_internal)
      .def("check",
           [](const OwnedTransport& t) {
             try {
               (*t).check();
             } catch (const Aborted&) {
               std::rethrow_exception(from_notice(std::current_exception()));
             }
           })
      .def("ask", [](const OwnedTransport& t) { (*t).ask(); })
      .def("wait", &wait_for, py::arg("lane"), py::arg("goals"), py::arg("timeout"),
           "Moves bytes on channels of a lane until each has sent and received its tickets.")
      .def_property_readonly("has_window",
                             [](const OwnedTransport& t) { return t.window() != nullptr; })
      .def("barrier", &barrier)
      .def(
          "abort",
          [](const OwnedTransport& t, const std::string& why, const std::string& kind, int rank,
             std::vector<int> ranks) {
            (*t).abort(notice(why, kind, t.rank, rank, std::move(ranks)));
          },
          py::arg("why"), py::arg("kind") = "error", py::arg("rank") = -1,
          py::arg("ranks") = std::vector<int>())
      .def("close", [](OwnedTransport& t) { t.transport.reset(); }, py::call_guard<GilReleased>());

  m.def(
      "python_store",
      [](const py::object& target) -> std::shared_ptr<Store> {
        return std::make_shared<PythonStore>(target);
      },
      py::arg("target"));
  m.def(
      "exchange",
      [](std::shared_ptr<Store> store, const std::string& group, const std::string& topic, int rank,
         int size, const std::string& word, double timeout, const std::string& secret) {
        GilReleased release;
        const Rendezvous rendezvous =
            make_rendezvous(std::move(store), group, rank, size, secret, milliseconds(timeout));
        return all_gather_values(rendezvous, topic, all_ranks(rendezvous), word);
      },
      py::arg("store"), py::arg("group"), py::arg("topic"), py::arg("rank"), py::arg("size"),
      py::arg("word"), py::arg("timeout"), py::arg("secret") = "",
      "The words of all ranks, each of which calls this.");
  m.def(
      "encode_notice",
      [](const std::string& text, const std::string& kind, int from, int rank,
         std::vector<int> ranks, size_t room) {
        const Notice made = notice(text, kind, from, rank, std::move(ranks));
        if (room == 0) return py::bytes(made.encoded());
        std::string bytes(std::max(room, Notice::kBytes), '\0');
        bytes.resize(made.encode(reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()));
        return py::bytes(bytes);
      },
      py::arg("text"), py::arg("kind") = "error", py::arg("from_rank") = 0, py::arg("rank") = -1,
      py::arg("ranks") = std::vector<int>(), py::arg("room") = 0,
      "The bytes of an abort notice; `room`: cut to so many, at least 1000.");
  m.def(
      "raise_notice",
      [](const std::string& bytes) {
        const Span<const uint8_t> span(reinterpret_cast<const uint8_t*>(bytes.data()),
                                       bytes.size());
        std::rethrow_exception(from_notice(std::make_exception_ptr(Aborted(Notice::decode(span)))));
      },
      py::arg("bytes"), "Raises the error that the bytes of a notice stand for.");
  m.def(
      "seal",
      [](const std::string& secret, const std::string& group, const std::string& name,
         const std::string& value) {
        std::string text;
        {
          GilReleased release;
          text = Seal(key_of_secret(secret), group).close(name, value);
        }
        return py::bytes(text);
      },
      py::arg("secret"), py::arg("group"), py::arg("name"), py::arg("value"),
      "A value of a group, with a proof of the secret, if there is one.");
}

}  // namespace pycomm
