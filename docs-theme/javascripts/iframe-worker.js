/* The theme searches in a worker, and a page that was opened as a file may not start one. There, the worker's script runs in a hidden frame instead. */
window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super()
    this.frame = document.createElement("iframe")
    this.frame.hidden = true
    document.body.appendChild(this.frame)
    const inner = this.frame.contentWindow
    inner.document.open()
    inner.document.write("<!doctype html><html><head></head><body></body></html>")
    inner.document.close()
    const page = inner.document
    const load = (address) =>
      new Promise((done, failed) => {
        const script = page.createElement("script")
        script.src = address
        script.onload = done
        script.onerror = () => failed(new Error(`cannot load ${address}`))
        page.body.appendChild(script)
      })
    inner.importScripts = (...addresses) =>
      addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve())
    inner.postMessage = (data) => this.answer(data)
    this.ready = load(url)
  }
  answer(data) {
    const message = new MessageEvent("message", { data })
    this.dispatchEvent(message)
    if (this.onmessage) this.onmessage(message)
  }
  postMessage(data) {
    const inner = this.frame.contentWindow
    this.ready.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })))
  }
  terminate() {
    this.frame.remove()
  }
}
if (location.protocol === "file:") window.Worker = window.IFrameWorker
