/* Put before the theme's search worker. A pasted log line is not a query of a few words: the theme would search for every word's prefix ("to" finds "token"), and
   stumble over its signs. Here it becomes its whole words, without times, addresses, paths and numbers that differ from run to run; and pages of causes, whose
   sections have most words of this kind, count more for such a line and less for words of a topic. */
;(() => {
  const listen = self.addEventListener
  const send = self.postMessage
  const CAUSE = /(?:^|\/)reference\/causes\//
  const FOR_A_LINE = 2
  const FOR_A_TOPIC = 0.5
  const VARYING = [
    /\x1b?\[\d{1,3}m/g,
    /\d{4}-\d\d-\d\d[T ]?|\b\d{1,2}:\d\d:\d\d(?:[.,]\d+)?|\b[A-Z][a-z]{2} {1,2}\d{1,2}\b/g,
    /\b(?!127\.)(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?:<\d+>)?/g,
    /https?:\/\/\S+/g,
    /\[(?:default\d*:)?rank ?\d+\]:?|\[PG[^\]]*\]|\[[WEFI]\d{3,4}\b|\bprocess_?\d+/gi,
    /(?:\/|\.\.\/|\b)(?:[\w.-]+\/){2,}/g,
    /\b0x[0-9a-f]+\b|\b[0-9a-f]{8,}\b/gi,
    /\b\w*\d{5,}\w*\b/g,
  ]
  const words = (line) => {
    const plain = VARYING.reduce((text, pattern) => text.replace(pattern, " "), line)
    const parts = plain.split(/[\s\-,;:!=[\]()"'`/|<>{}+*^~&%$#@?\\]+|\.(?!\d)/)
    return [...new Set(parts)].filter((word) => word.length > 1 && !/^(?!127\.)[\d.]+[smkMG]?[Bs]?$/.test(word))
  }
  const isSentence = (query) => query.trim().split(/\s+/).length > 2 || /[:=[\](){}<>/\\^~*+#]|\w'\w/.test(query)
  const prepared = (query) => (isSentence(query) && words(query).length ? words(query).map((word) => `${word}^1`).join(" ") : query)
  // The theme cuts a run of Chinese into words of the index, but never looks at its last character (material 9.7, `for (let end = start + 1; end < length; …)`).
  const inChinese = (query) => query.replace(/\p{sc=Han}{2,}/gu, (run) => `${run}〇`)
  // What log lines have, and topics and names of keys have not: the sign of a message, a path, the name of an exception or a signal, or many words.
  const isLogLine = (query) =>
    !/^(?:how|what|why|when|where|which|can|does|do|is|should)\b/i.test(query) &&
    (query.trim().split(/\s+/).length > 6 ||
      /\S[:=]\s|:\d|[[\](){}<>\\^~*#]|(?:^|\s)\.{0,2}\/\w|\w\/[\w.-]+\//.test(query) ||
      /[a-z](?:Error|Exception|Warning)\b|\bSIG[A-Z]{3,}\b|\bexit ?code\b/.test(query))
  let ofCauses = 1
  const weighed = (pages) =>
    pages
      .map((sections) => [sections, Math.max(...sections.map((one) => one.score)) * (CAUSE.test(sections[0].location) ? ofCauses : 1)])
      .sort((one, other) => other[1] - one[1])
      .map(([sections]) => sections)
  self.postMessage = (answer) =>
    send.call(self, answer.data && answer.data.items ? { ...answer, data: { ...answer.data, items: weighed(answer.data.items) } } : answer)
  self.addEventListener = (type, handler) =>
    listen.call(self, type, (event) => {
      const { type: kind, data } = event.data || {}
      if (kind !== 2) return handler(event)
      ofCauses = isLogLine(data) ? FOR_A_LINE : FOR_A_TOPIC
      return handler({ data: { type: kind, data: /\p{sc=Han}/u.test(data) ? inChinese(data) : prepared(data) } })
    })
})()
