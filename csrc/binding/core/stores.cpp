// Stores and the choice of interfaces for Python.
#include <pybind11/stl.h>

#include <memory>

#include "binding/core/arguments.h"
#include "binding/core/errors.h"
#include "binding/core/gil.h"
#include "binding/core/module.h"
#include "binding/core/python_store.h"
#include "transports/tcp/endpoint/group_formation.h"
#include "transports/tcp/net/interface.h"
#include "transports/tcp/tls/library.h"

namespace py = pybind11;

namespace pycomm {
namespace {

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
          py::arg("target"), "An object of Python: see binding/core/python_store.h.")
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

  m.def("tls_version", &tcp::openssl::version, py::arg("file") = "",
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
