#include "weft/comm/ucx_plugin.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <filesystem>

#include "weft/comm/settings.h"

namespace weft::comm {
namespace {

struct Plugin {
  decltype(&weft_ucx_transport_1) make = nullptr;
  std::string reason;
};

std::filesystem::path plugin_path() {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&ucx_unavailable_reason), &info);
  return std::filesystem::path(info.dli_fname ? info.dli_fname : "").parent_path() / "libweft_ucx.so";
}

Plugin load() {
  const auto path = plugin_path();
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return {nullptr, dlerror()};  // names the missing library, e.g. libucp.so.0
  auto make = reinterpret_cast<decltype(&weft_ucx_transport_1)>(dlsym(library, "weft_ucx_transport_1"));
  if (!make) return {nullptr, path.string() + " belongs to another version of weft"};
  return {make, ""};
}

const Plugin& plugin() {
  static const Plugin loaded = load();
  return loaded;
}

}  // namespace

std::string ucx_unavailable_reason() {
  if (!ucx_trusted())
    return "WEFT_UCX_TRUSTED is not 1: anyone who can connect to UCX's TCP port can crash a rank. Set it to 1 if only "
           "the hosts of this job can reach the network";
  const auto path = plugin_path();
  if (!std::filesystem::exists(path)) return "weft was built without UCX: there is no " + path.string();
  return "";
}

std::string load_ucx() {
  auto reason = ucx_unavailable_reason();
  return reason.empty() ? plugin().reason : reason;
}

std::unique_ptr<Transport> make_ucx_transport(const UcxOptions& options) {
  const auto reason = load_ucx();
  TORCH_CHECK_NOT_IMPLEMENTED(reason.empty(), "No UCX transport for group '", options.group, "': ", reason, ".");
  return std::unique_ptr<Transport>(plugin().make(options));
}

}  // namespace weft::comm
