// Stores and the choice of interfaces for Python.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "binding/core/arguments.h"
#include "binding/core/errors.h"
#include "binding/core/gil.h"
#include "binding/core/module.h"
#include "core/error.h"
#include "transports/openssl.h"
#include "transports/store.h"
#include "transports/tcp/endpoint/group_formation.h"
#include "transports/tcp/net/interface.h"

namespace py = pybind11;

namespace pycomm {
namespace {

/// An object of Python as a Store.
///
/// Calls the methods of an object that has those of Store: `set(key, value)`, `find(key)`, which
/// returns None for a key that is not there, `append(key, value)`, if they count `add(key, amount)`
/// and `erase(key)`, and the properties `appends` and `round_trip` (in seconds). Values are bytes.
class PythonStore final : public Store {
 public:
  explicit PythonStore(py::object target)
      : target_(std::move(target)),
        appends_(target_.attr("appends").cast<bool>()),
        counts_(py::hasattr(target_, "erase")) {}
  ~PythonStore() override {
    if (!Py_IsInitialized()) {
      target_.release();
      return;
    }
    const GilAcquired gil;
    target_ = py::object();
  }

  void set(const std::string& key, const std::string& value) override {
    asking(key, [&] { target_.attr("set")(key, py::bytes(value)); });
  }
  std::optional<std::string> find(const std::string& key) override {
    return asking(key, [&] { return text(target_.attr("find")(key)); });
  }
  bool appends() const override { return appends_; }
  void append(const std::string& key, const std::string& value) override {
    asking(key, [&] { target_.attr("append")(key, py::bytes(value)); });
  }
  int64_t count(const std::string& key) override {
    if (!counts_) return 0;
    return asking(key, [&] { return target_.attr("add")(key, 1).template cast<int64_t>(); });
  }
  void erase(const std::string& key) override {
    asking(key, [&] { target_.attr("erase")(key); });
  }
  std::chrono::microseconds round_trip() const override {
    const GilAcquired gil;
    const double seconds = target_.attr("round_trip").cast<double>();
    return std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
  }

 private:
  static std::optional<std::string> text(const py::object& value) {
    if (value.is_none()) return std::nullopt;
    return value.cast<std::string>();
  }
  /// What the object raises becomes an Error. An interrupt, such as KeyboardInterrupt, stays one.
  template <typename Ask>
  static auto asking(const std::string& key, const Ask& ask) -> decltype(ask()) {
    const GilAcquired gil;
    try {
      return ask();
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;
      const auto what = py::str(error.value()).cast<std::string>();
      throw Error("the store failed at the key " + key + ": " + what);
    }
  }

  py::object target_;
  const bool appends_;  ///< several ranks may append to one key
  const bool counts_;
};

Deadline after_seconds(double seconds) { return Deadline::after(milliseconds(seconds)); }

tcp::Address address_of(const std::string& text) {
  tcp::Address address;
  if (tcp::Address::parse(text, address)) return address;
  throw Error("\"" + text + "\" is no IP address with a port");
}

}  // namespace

void bind_stores(py::module_& m) {
  py::class_<Store, std::shared_ptr<Store>>(m, "Store")
      .def_static(
          "local", [](bool appends) { return make_local_store(appends); },
          py::arg("appends") = false,
          "For ranks that are threads of this process. `appends`: as torch's TCPStore does.")
      .def_static(
          "of",
          [](const py::object& target) -> std::shared_ptr<Store> {
            return std::make_shared<PythonStore>(target);
          },
          py::arg("target"), "An object of Python with the methods of a Store.")
      .def_static("file", &make_file_store, py::arg("folder"), "For processes that share a folder.")
      .def(
          "set",
          [](Store& store, const std::string& key, const std::string& value) {
            GilReleased release;
            store.set(key, value);
          },
          py::arg("key"), py::arg("value"))
      .def(
          "get",
          [](Store& store, const std::string& key, double timeout) {
            std::string value;
            {
              GilReleased release;
              value = store.get(key, after_seconds(timeout));
            }
            return py::bytes(value);
          },
          py::arg("key"), py::arg("timeout"))
      .def_static(
          "find",
          [](const std::vector<std::string>& addresses, int64_t number, int rank,
             const GroupOptions& options, double timeout) {
            std::vector<tcp::Address> parsed;
            for (const std::string& address : addresses) parsed.push_back(address_of(address));
            const GilReleased release;
            return tcp::find_store(parsed, number, rank, options, milliseconds(timeout),
                                   &check_signals);
          },
          py::arg("addresses"), py::arg("number"), py::arg("rank"), py::arg("options"),
          py::arg("timeout"), "The store that rank 0 lends at an address, for which this waits.");

  py::class_<tcp::Endpoint>(m, "StoreEndpoint")
      .def(py::init([](const std::string& address, const GroupOptions& options) {
             return std::make_unique<tcp::Endpoint>(address_of(address), options);
           }),
           py::arg("address"), py::arg("options"), "Listens at an address until it is collected.")
      .def(
          "lend", [](tcp::Endpoint& endpoint, int64_t number) { return endpoint.lend(number); },
          py::arg("number"),
          "The store of this number, which other ranks find; the endpoint must outlive it.");

  m.def("tls_version", &openssl::version, py::arg("file") = "",
        "The OpenSSL that encrypts; raises Error if there is none. `file`: look at this one.");
  m.def(
      "interfaces",
      [] {
        std::vector<std::pair<std::string, std::string>> found;
        for (const auto& i : tcp::interfaces()) found.emplace_back(i.name, i.address.ip());
        return found;
      },
      "Names and addresses of the interfaces that are up.");
  m.def(
      "choose_interfaces",
      [](const std::string& names, bool one_host,
         const std::vector<std::pair<std::string, std::string>>& candidates,
         const std::string& store_host) {
        std::vector<tcp::Interface> interfaces;
        for (const auto& [interface, ip] : candidates) {
          interfaces.push_back({interface, {}});
          if (!tcp::Address::parse(ip, interfaces.back().address))
            throw Error("\"" + ip + "\" is not an IP address");
        }
        std::vector<std::pair<std::string, std::string>> chosen;
        for (const auto& i : tcp::choose_interfaces({names, store_host, one_host}, interfaces)) {
          chosen.emplace_back(i.name, i.address.ip());
        }
        return chosen;
      },
      py::arg("names"), py::arg("one_host"), py::arg("candidates"), py::arg("store_host") = "",
      "Names and addresses of the interfaces that a group would use, of candidates (name, "
      "address).");
}

}  // namespace pycomm
