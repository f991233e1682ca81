// Stores and the choice of interfaces for Python.
#include <pybind11/stl.h>

#include <memory>
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

std::vector<tcp::Address> addresses_of(const std::string& text) {
  std::vector<tcp::Address> addresses = tcp::Address::parse_list(text);
  if (addresses.empty()) throw Error("\"" + text + "\" is no IP address with a port");
  return addresses;
}

}  // namespace

void bind_stores(py::module_& m) {
  py::class_<Store, std::shared_ptr<Store>>(m, "Store")
      .def_static(
          "local", [](bool appends) { return make_local_store(appends); },
          py::arg("appends") = false,
          "For ranks that are threads of this process. `appends`: as torch's TCPStore does.")
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
              value = store.get(key, Deadline::after(milliseconds(timeout)));
            }
            return py::bytes(value);
          },
          py::arg("key"), py::arg("timeout"))
      .def_static(
          "find",
          [](const std::string& where, int64_t number, int rank, const GroupOptions& options,
             double timeout) {
            const tcp::Handle there = where.find(' ') == std::string::npos
                                          ? tcp::known_handle(addresses_of(where), options)
                                          : tcp::Handle::parse(where);
            const GilReleased release;
            return tcp::find_store(there, number, rank, options, milliseconds(timeout),
                                   &check_signals);
          },
          py::arg("where"), py::arg("number"), py::arg("rank"), py::arg("options"),
          py::arg("timeout"),
          "The store that rank 0 lends at \"address,address\" or at a handle, for which this "
          "waits.");

  py::class_<tcp::Endpoint>(m, "StoreEndpoint")
      .def(py::init([](const std::string& address, const GroupOptions& options) {
             const GilReleased release;
             if (address.empty()) return std::make_unique<tcp::Endpoint>("store", options);
             return std::make_unique<tcp::Endpoint>(addresses_of(address).front(), options);
           }),
           py::arg("address"), py::arg("options"),
           "Listens until it is collected, at an address; \"\": where its handle says.")
      .def_property_readonly("handle", [](const tcp::Endpoint& e) { return e.handle().text(); })
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
