// Shared by all figures: elements, packed numbers, tooltips, and mounting every figure that is not mounted yet.
// Text reaches the page through textContent only.
const make = (tag, name, parent, text) => {
  const node = document.createElement(tag);
  if (name) node.className = 'tlhm-' + name;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const half = (h) => {
  const e = (h >> 10) & 31, m = h & 1023, s = h & 32768 ? -1 : 1;
  return e === 31 ? NaN : s * (e ? 2 ** (e - 15) * (1 + m / 1024) : (2 ** -14 * m) / 1024);
};
const unpack = (p) => {
  if (p.f !== undefined) return new Float32Array(bytes(p.f).buffer);
  if (p.h !== undefined) return Array.from(new Uint16Array(bytes(p.h).buffer), (v) => (half(v) * p.m) / 1024);
  const table = new Float32Array(bytes(p.t).buffer);
  return Float32Array.from(bytes(p.i), (i) => table[i]);
};
const show = (value, digits = 4) => {
  if (Number.isNaN(value)) return 'missing';
  const text = String(Number(value.toPrecision(digits)));
  return text.replace('-', '−').replace('e−', 'e-').replace(/^(\d+)(?=\d{3}$)/, value >= 10000 ? '$1,' : '$1');
};
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const position = (scale, value) =>
  scale.high > scale.low ? clamp((value - scale.low) / (scale.high - scale.low), 0, 1) : 0.5;
// What can be touched over an image of a drawing, and stays there when the drawing shrinks.
const over = (image, name) => {
  const { width, height } = image.ownerSVGElement.viewBox.baseVal;
  const moved = image.parentNode.transform?.baseVal.consolidate()?.matrix;
  const at = (key, whole, shift = 0) => (100 * (image[key].baseVal.value + shift)) / whole + '%';
  const box = make('div', name, image.ownerSVGElement.parentNode);
  Object.assign(box.style, {
    left: at('x', width, moved?.e), top: at('y', height, moved?.f), width: at('width', width), height: at('height', height),
  });
  return box;
};
const lists = (parent, entries) => {
  for (const list of entries || []) {
    const box = make('div', 'list', parent);
    make('div', 'lt', box, list.title);
    const table = make('table', '', box);
    for (const cells of list.rows) {
      const row = make('tr', '', table);
      for (const cell of cells) make('td', '', row).append(make('bdi', '', null, cell));
    }
  }
};
// A tooltip that follows a point of the figure, and a line that screen readers speak.
const speaker = (root) => {
  const tip = make('div', 'tip', root);
  const live = make('div', 'live', root);
  live.setAttribute('aria-live', 'polite');
  return {
    tip,
    hide: () => tip.classList.remove('tlhm-on'),
    say(title, lines, box, aloud) {
      tip.replaceChildren();
      make('b', '', tip).append(make('bdi', '', null, title));
      for (const [name, text] of lines) {
        const line = make('div', '', tip);
        if (name) make('span', 'k', line, name + ' ');
        line.append(text);
      }
      tip.classList.add('tlhm-on');
      const frame = root.getBoundingClientRect();
      const x = box.left - frame.left + box.width / 2 - tip.offsetWidth / 2;
      const above = box.top - frame.top - tip.offsetHeight - 8;
      tip.style.left = clamp(x, 2, Math.max(2, frame.width - tip.offsetWidth - 2)) + 'px';
      tip.style.top = (above > 0 ? above : box.bottom - frame.top + 8) + 'px';
      if (aloud) live.textContent = [title, ...lines.map(([name, text]) => (name ? name + ' ' : '') + text)].join(', ');
    },
  };
};
const searchBox = (parent, hint, onInput, onEnter) => {
  const wrap = make('label', 'find', parent);
  const box = make('input', '', wrap);
  box.type = 'search';
  box.placeholder = hint;
  box.setAttribute('aria-label', hint);
  const found = make('span', 'found', wrap);
  found.setAttribute('role', 'status');
  box.addEventListener('input', () => (found.textContent = onInput(box.value.trim())));
  box.addEventListener('keydown', (event) => {
    if (event.key === 'Enter') (event.preventDefault(), onEnter());
    event.stopPropagation();
  });
};
const mount = (kind, draw) => {
  for (const root of document.querySelectorAll(`.tlhm[data-kind=${kind}]:not([data-ready])`)) {
    root.dataset.ready = '';
    const data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
    Promise.resolve(draw(root, data)).then(
      () => root.querySelector(':scope > .tlhm-alt')?.removeAttribute('open'),
      (error) => make('div', 'note', root.querySelector('.tlhm-draw'), `This browser cannot draw the view (${error}); below is its text.`),
    );
  }
};
