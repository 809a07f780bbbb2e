// Asks the search of a built site, as its pages do: the theme's own worker with the site's own index.
// node search.js SITE < queries.json > results.json: for each query, the addresses of the results, best first.
const fs = require("fs"), path = require("path"), vm = require("vm")
const site = process.argv[2]
const assets = path.join(site, "assets/javascripts")
const worker = fs.readdirSync(path.join(assets, "workers")).find((name) => /^search\..*\.js$/.test(name))
let answer, hear
const inner = { console, URL, setTimeout, postMessage: (data) => answer(data), addEventListener: (_, handler) => (hear = handler) }
inner.self = inner
inner.importScripts = (...names) =>
  names.forEach((name) => vm.runInContext(fs.readFileSync(path.join(assets, "workers", name), "utf8"), inner))
vm.createContext(inner)
vm.runInContext(fs.readFileSync(path.join(assets, "workers", worker), "utf8"), inner)
const ask = (type, data) =>
  new Promise((done) => {
    answer = done
    hear({ data: { type, data } })
  })
const main = async () => {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"))
  await ask(0, { ...index, options: { suggest: false } })
  const found = []
  for (const query of JSON.parse(fs.readFileSync(0, "utf8"))) {
    const { data } = await ask(2, query)
    found.push(data.items.map((pages) => pages[0].location.split("#")[0]))
  }
  process.stdout.write(JSON.stringify(found))
}
main()
