// Runs the live page's script on a document that only holds elements, and then the expression given as argument.
//     node live_page.js PAGE EXPRESSION
// Prints the expression's value as JSON. The page's requests stay without an answer; `clock.ms` is its time.
"use strict";
const fs = require("fs"), vm = require("vm");

class Element {
  constructor(name) { Object.assign(this, {name, className: "", title: "", children: [], style: {}, dataset: {}, attributes: {}}); }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener() {}
  insertRow() { this.append(new Element("tr")); return this.children.at(-1); }
  get all() { return this.children.filter(each => each instanceof Element).flatMap(each => [each, ...each.all]); }
  querySelectorAll(selector) { return this.all.filter(each => selector === "[open]" ? each.open : each.name === selector); }
  get textContent() { return this.children.map(each => each instanceof Element ? each.textContent : String(each)).join(""); }
  set textContent(text) { this.children = [text]; }
}

const [page, expression] = process.argv.slice(2);
const html = fs.readFileSync(page, "utf8"), elements = {};
for (const [, id] of html.matchAll(/ id="(\w+)"/g)) elements[id] = new Element(id);
const clock = {ms: 0};
const context = vm.createContext({
  clock, fetch: () => new Promise(() => {}), performance: {now: () => clock.ms}, sessionStorage: {getItem: () => null},
  document: {
    getElementById: id => elements[id], createElement: name => new Element(name),
    createElementNS: (_, name) => new Element(name), querySelectorAll: () => [],
  },
});
vm.runInContext(html.match(/<script>(.*)<\/script>/s)[1], context);
console.log(JSON.stringify(vm.runInContext(expression, context)));
