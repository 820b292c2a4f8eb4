#include "weft/comm/ucx_plugin.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <filesystem>

namespace weft::comm {
namespace {

struct Plugin {
  decltype(&weft_ucx_link_1) make = nullptr;
  std::string why_not;
};

std::filesystem::path beside_this_library() {
  Dl_info here{};
  dladdr(reinterpret_cast<void*>(&why_no_ucx), &here);
  return std::filesystem::path(here.dli_fname ? here.dli_fname : "").parent_path() / "libweft_ucx.so";
}

Plugin load() {
  const auto path = beside_this_library();
  if (!std::filesystem::exists(path)) return {nullptr, "weft was built without UCX: there is no " + path.string()};
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return {nullptr, dlerror()};  // names the missing one, e.g. libucp.so.0
  auto make = reinterpret_cast<decltype(&weft_ucx_link_1)>(dlsym(library, "weft_ucx_link_1"));
  if (!make) return {nullptr, path.string() + " is of another version of weft"};
  return {make, ""};
}

const Plugin& plugin() {
  static const Plugin loaded = load();
  return loaded;
}

}  // namespace

const std::string& why_no_ucx() { return plugin().why_not; }

std::unique_ptr<Link> make_ucx_link(const UcxOptions& options) {
  TORCH_CHECK_NOT_IMPLEMENTED(plugin().make, "No link over UCX for group '", options.group, "': ", why_no_ucx());
  return std::unique_ptr<Link>(plugin().make(options));
}

}  // namespace weft::comm
